"""S1: saves and loads on a real S3 server on this machine, beside plain requests of its clients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from benchmarks.processes import Progress
from benchmarks.resharding import CASES, SAVING_RANKS, Resharding
from benchmarks.rounds import Measurement, Sample, sum_over_ranks, synchronize, timed
from benchmarks.s3.limits import CLIENTS, RawLoops
from benchmarks.s3.service import Buckets, S3Service
from benchmarks.s3.sides import ObjectSide, connector_side, ours, stock_side
from benchmarks.workloads import State, build_state

__all__ = [
    "CASES",
    "LOAD",
    "SAVE",
    "SAVING_RANKS",
    "ObjectSpec",
    "load_resharded_objects",
    "measure_objects",
    "not_installed",
    "save_for_resharding_objects",
]

SAVE, LOAD = "save to S3", "load from S3"
_KEY = "run/step-00000001"
_STOCK_THREADS = 2
_LOADS_A_SAVE = 2
"""Rounds of loads for one of saves, which takes five times as long."""


@dataclass(frozen=True)
class ObjectSpec:
    """A job: workload, size, number of rounds, server."""

    workload: str
    scale: float
    rounds: int
    service: S3Service


def not_installed(service: S3Service) -> list[str]:
    """Return the contenders that are skipped because their packages are not installed."""
    missing = [] if connector_side(service) else ["s3torchconnector[dcp]"]
    try:
        CLIENTS["obstore"](service)
    except ImportError:
        missing.append("obstore")
    return missing


def measure_objects(rank: int, world_size: int, progress: Progress, spec: ObjectSpec) -> list[Measurement]:
    """Run all rounds of saves and loads on one rank."""
    spec.service.enter()
    state = build_state(spec.workload, spec.scale, rank=rank, world_size=world_size)
    with closing(_ObjectRounds(spec, state, progress)) as rounds:
        return rounds.run()


class _ObjectRounds:
    def __init__(self, spec: ObjectSpec, state: State, progress: Progress) -> None:
        self._spec = spec
        self._state = state
        self._progress = progress
        self._buckets = Buckets(spec.service, spec.workload.lower())
        connector = connector_side(spec.service)
        self._sides = [ours(), stock_side(), *([connector] if connector else [])]
        self._kept: dict[str, str] = {}
        self._raw = RawLoops(spec.service, state.size_bytes, self._buckets, progress)

    def run(self) -> list[Measurement]:
        """Warm up, then run the rounds: all saves, then, after the server's cleanup, the loads."""
        self._warm_up()
        size_bytes, tensors = self._state.size_bytes, len(self._state.by_fqn)
        results = [
            Measurement(self._spec.workload, 1, operation, size_bytes, tensors) for operation in (SAVE, LOAD)
        ]
        results[0].facts["settings"] = self._raw.settings["put"]
        results[1].facts["settings"] = self._raw.settings["get"]
        self._rounds(results[0], self._savers, self._spec.rounds)
        for load in self._loaders().values():
            load()
        self._rounds(results[1], self._loaders, _LOADS_A_SAVE * self._spec.rounds)
        return results

    def _rounds(
        self, result: Measurement, contenders: Callable[[], dict[str, Callable[[], Sample]]], rounds: int
    ) -> None:
        for number in range(rounds):
            result.take(number, contenders())
            self._progress(f"round {number + 1}/{rounds}, {result.operation}: {result.latest()}")

    def close(self) -> None:
        """Remove all buckets."""
        self._raw.close()
        for bucket in self._kept.values():
            self._buckets.remove(bucket)
        self._buckets.close()

    def _warm_up(self) -> None:
        """Save and load once with each contender; check the loads, and keep the checkpoints for the
        rounds."""
        for side in self._sides:
            self._progress(f"warming up {side.name}")
            bucket = self._kept[side.name] = self._buckets.make()
            side.save(self._state.state_dict, _url(bucket))
            self._state.wipe()
            side.load(self._state.state_dict, _url(bucket))
            if not self._state.is_intact():
                raise RuntimeError(f"{side.name} loaded other bytes than it saved in {self._spec.workload}")

    def _savers(self) -> dict[str, Callable[[], Sample]]:
        sides = [*self._sides, stock_side(_STOCK_THREADS)]
        savers: dict[str, Callable[[], Sample]] = {
            side.name: partial(self._timed_save, side) for side in sides
        }
        for name in self._raw.names("put"):
            savers[f"raw_put_{name}"] = partial(self._timed_put, name)
        return savers

    def _loaders(self) -> dict[str, Callable[[], Sample]]:
        loaders: dict[str, Callable[[], Sample]] = {
            side.name: partial(self._timed_load, side) for side in self._sides
        }
        for name in self._raw.names("get"):
            loaders[f"raw_get_{name}"] = partial(self._timed, partial(self._raw.get, name))
        return loaders

    def _timed(self, operation: Callable[[], object]) -> Sample:
        return _timed(operation, self._spec.service)

    def _timed_save(self, side: ObjectSide) -> Sample:
        with self._buckets.one() as bucket:
            return self._timed(lambda: side.save(self._state.state_dict, _url(bucket)))

    def _timed_put(self, name: str) -> Sample:
        with self._buckets.one() as bucket:
            return self._timed(lambda: self._raw.put(name, bucket))

    def _timed_load(self, side: ObjectSide) -> Sample:
        return self._timed(lambda: side.load(self._state.state_dict, _url(self._kept[side.name])))


def save_for_resharding_objects(
    rank: int, world_size: int, progress: Progress, scale: float, service: S3Service, buckets: dict[str, str]
) -> None:
    """Save the checkpoints of both contenders, sharded on dimension 0, each to its own bucket."""
    service.enter()
    state = build_state("W1", scale, rank=rank, world_size=world_size)
    for side in (ours(), stock_side()):
        progress(f"saving with {side.name}")
        side.save(state.state_dict, _url(buckets[side.name]))


def load_resharded_objects(
    rank: int,
    world_size: int,
    progress: Progress,
    spec: ObjectSpec,
    dim: int,
    buckets: dict[str, str],
) -> Resharding:
    """Run the rounds of one case; check the first, untimed loads byte by byte."""
    spec.service.enter()
    state = build_state(spec.workload, spec.scale, rank=rank, world_size=world_size, dim=dim)
    result = Resharding(world_size, dim, int(sum_over_ranks(state.size_bytes)))
    sides = {side.name: side for side in (ours(), stock_side())}
    for side in sides.values():
        state.wipe()
        fetched = side.load(state.state_dict, _url(buckets[side.name]))
        if fetched is not None:
            result.bytes_read[side.name] = int(sum_over_ranks(fetched))
        if not state.is_intact():
            raise RuntimeError(f"{side.name} loaded other bytes than were saved")
    loads = {
        name: partial(_timed, partial(side.load, state.state_dict, _url(buckets[name])), spec.service)
        for name, side in sides.items()
    }
    for number in range(spec.rounds):
        result.take(number, loads)
        progress(f"round {number + 1}/{spec.rounds}: {result.latest()}")
    synchronize()
    return result


def _timed(operation: Callable[[], object], service: S3Service) -> Sample:
    service.settle()
    return timed(operation, service.cpu_seconds)


def _url(bucket: str) -> str:
    return f"s3://{bucket}/{_KEY}"
