"""Save and load one workload with dcphub and stock in turn, with the machine's limits in the same rounds."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.machine import limits, page_cache
from benchmarks.peers import peer_sides
from benchmarks.processes import Progress
from benchmarks.sides import OURS, SAVERS, STOCK, Side
from benchmarks.workloads import State, build_state

__all__ = [
    "OPERATIONS",
    "Measurement",
    "Sample",
    "Spec",
    "Timings",
    "busy_seconds",
    "max_over_ranks",
    "measure",
    "remove_durably",
    "rotated",
    "sum_over_ranks",
    "synchronize",
    "timed",
]

OPERATIONS = ("save durable", "save", "load warm", "load cold")
_COLD_ENOUGH = 0.02


@dataclass(frozen=True)
class Spec:
    """A job: workload, size, operations, number of rounds, folder."""

    workload: str
    scale: float
    rounds: int
    operations: tuple[str, ...]
    folder: Path


class Sample(NamedTuple):
    """One timing: seconds, and the cores kept busy by other processes and the kernel."""

    seconds: float
    others: float


class Timings:
    """Seconds by contender, one per round: sample r of all contenders belongs to round r.

    ``others`` are the cores that other processes kept busy meanwhile.
    """

    samples: dict[str, list[float]]
    others: dict[str, list[float]]

    def note(self, name: str, sample: Sample) -> None:
        """Add a sample of a contender."""
        self.samples.setdefault(name, []).append(sample.seconds)
        self.others.setdefault(name, []).append(sample.others)

    def take(self, number: int, contenders: Mapping[str, Callable[[], Sample]]) -> None:
        """Add one sample of each contender for round ``number``."""
        for name in rotated(list(contenders), number):
            self.note(name, contenders[name]())

    def latest(self) -> str:
        """Return the seconds of the last round."""
        return ", ".join(f"{name} {seconds[-1]:.3f} s" for name, seconds in self.samples.items())


@dataclass
class Measurement(Timings):
    """Timings of one operation of a workload."""

    workload: str
    ranks: int
    operation: str
    size_bytes: int
    tensors: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    others: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def synchronize() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def max_over_ranks(value: float) -> float:
    """Return the largest value of all ranks, on all ranks."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def sum_over_ranks(value: float) -> float:
    """Return the sum of all ranks' values, on all ranks."""
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def timed(operation: Callable[[], object], server_seconds: Callable[[], float] = lambda: 0.0) -> Sample:
    """Return the seconds of the slowest rank; all ranks start together after a garbage collection.

    ``server_seconds`` is the processor time of a server that all ranks use; it does not count as load of
    other processes.
    """
    gc.collect()
    synchronize()
    server, busy, own, begun = server_seconds(), busy_seconds(), time.process_time(), time.perf_counter()
    operation()
    elapsed, own = time.perf_counter() - begun, time.process_time() - own
    seconds = max_over_ranks(elapsed)
    busy, server = busy_seconds() - busy, server_seconds() - server
    return Sample(seconds, max(0.0, busy - server - sum_over_ranks(own)) / seconds)


def busy_seconds() -> float:
    """Return the busy seconds of all cores since boot: all but idle, I/O wait and stolen time."""
    user, nice, system, _, _, interrupt, soft, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + interrupt + soft) / os.sysconf("SC_CLK_TCK")


def remove_durably(folder: Path) -> None:
    """Remove a folder and sync the removal, so that no later timing pays for it."""
    shutil.rmtree(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return the contenders in an order that starts with another one in each round."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def measure(rank: int, world_size: int, progress: Progress, spec: Spec) -> list[Measurement]:
    """Run all rounds of a job on this rank; only the result of rank 0 is used."""
    state = build_state(spec.workload, spec.scale, rank=rank, world_size=world_size)
    with closing(_SavesAndLoads(spec, state, rank, progress)) as rounds:
        return rounds.run()


class _SavesAndLoads:
    def __init__(self, spec: Spec, state: State, rank: int, progress: Progress) -> None:
        self._spec = spec
        self._state = state
        self._rank = rank
        self._progress = progress
        self._peers = peer_sides(spec.workload, dist.get_world_size() if dist.is_initialized() else 1)
        self._saves = 0
        self._kept: dict[str, Path] = {}
        self._raw: limits.RawReads | None = None
        self._cold_left = 0.0

    def run(self) -> list[Measurement]:
        """Warm up, then the rounds."""
        spec = self._spec
        size_bytes = int(sum_over_ranks(self._state.size_bytes))
        results = {
            operation: Measurement(
                spec.workload,
                dist.get_world_size() if dist.is_initialized() else 1,
                operation,
                size_bytes,
                len(self._state.by_fqn),
            )
            for operation in spec.operations
        }
        self._warm_up()
        for number in range(spec.rounds):
            for operation, result in results.items():
                result.take(number, self._contenders(operation))
                ours = result.samples["ours"][-1]
                self._progress(f"round {number + 1}/{spec.rounds}, {operation}: ours {ours:.3f} s")
        for operation in ("load cold",):
            if operation in results:
                results[operation].facts["largest_resident_fraction"] = self._cold_left
        return list(results.values())

    def close(self) -> None:
        """Close files."""
        if self._raw is not None:
            self._raw.close()

    # -- preparation -----------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Save and load once with each contender; check the loads, and keep the files for the rounds."""
        for side in (OURS, STOCK, *self._peers):
            self._progress(f"warming up {side.name}")
            folder = self._kept[side.name] = self._spec.folder / f"kept-{side.name}"
            side.save(self._state.state_dict, folder, True)
            synchronize()
            self._state.wipe()
            side.load(self._state.state_dict, folder)
            if not self._state.is_intact():
                raise RuntimeError(
                    f"{side.name} loaded bytes that differ from the saved bytes in {self._spec.workload}"
                )
        offsets = {}
        by_address = {local.data_ptr(): place for local, _, place in self._state.locals}
        for fqn, tensor in self._state.by_fqn.items():
            offsets[fqn] = by_address.get(tensor.data_ptr(), ())
        self._raw = limits.RawReads(self._kept["ours"], self._state.by_fqn, offsets)

    def _contenders(self, operation: str) -> dict[str, Callable[[], Sample]]:
        if operation in ("save durable", "save"):
            return self._savers(durable=operation == "save durable")
        return self._loaders(cold=operation == "load cold")

    # -- saves -----------------------------------------------------------------------------------------------

    def _savers(self, *, durable: bool) -> dict[str, Callable[[], Sample]]:
        savers = SAVERS | {peer.name: peer.save for peer in self._peers}

        def saver(name: str) -> Callable[[], Sample]:
            return lambda: self._timed_save(
                lambda folder: savers[name](self._state.state_dict, folder, durable)
            )

        contenders = {name: saver(name) for name in savers}
        size_bytes = self._state.size_bytes
        if durable:
            contenders["raw_direct_write"] = lambda: self._timed_raw_write(
                lambda paths: limits.write_direct(paths[0], size_bytes)
            )
        else:
            contenders["raw_write"] = lambda: self._timed_raw_write(
                lambda paths: limits.write_page_cache(paths[:1], size_bytes)
            )
            contenders["raw_write_2_files"] = lambda: self._timed_raw_write(
                lambda paths: limits.write_page_cache(paths, size_bytes)
            )
        contenders["memory_copy"] = lambda: timed(lambda: limits.copy_memory(self._tensors()))
        return contenders

    def _tensors(self) -> list[torch.Tensor]:
        return list(self._state.by_fqn.values())

    def _fresh_folder(self) -> Path:
        self._saves += 1
        return self._spec.folder / f"save-{self._saves}"

    def _timed_save(self, save: Callable[[Path], None]) -> Sample:
        folder = self._fresh_folder()
        sample = timed(lambda: save(folder))
        self._remove(folder)
        return sample

    def _timed_raw_write(self, write: Callable[[list[Path]], float]) -> Sample:
        folder = self._fresh_folder()
        if self._rank == 0:
            folder.mkdir()
        paths = [folder / f"{self._rank}-{number}" for number in range(2)]
        sample = timed(lambda: write(paths))
        self._remove(folder)
        return sample

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint durably, outside the timing."""
        synchronize()
        if self._rank == 0:
            remove_durably(folder)
        synchronize()

    # -- loads -----------------------------------------------------------------------------------------------

    def _loaders(self, *, cold: bool) -> dict[str, Callable[[], Sample]]:
        def loader(side: Side) -> Callable[[], Sample]:
            def load() -> Sample:
                folder = self._kept[side.name]
                self._prepare_cache(folder, cold=cold)
                return timed(lambda: side.load(self._state.state_dict, folder))

            return load

        def raw(threads: int) -> Callable[[], Sample]:
            def read() -> Sample:
                reads = self._raw
                if reads is None:
                    raise RuntimeError("raw reads come after the warm-up")
                self._prepare_cache(self._kept["ours"], cold=cold)
                return timed(lambda: reads.read(threads))

            return read

        kind = "cold" if cold else "warm"
        peers = [] if cold else self._peers
        contenders = {side.name: loader(side) for side in (OURS, STOCK, *peers)}
        contenders[f"raw_read_{kind}_1_thread"] = raw(1)
        contenders[f"raw_read_{kind}_2_threads"] = raw(2)
        if not cold:
            contenders["memory_copy"] = lambda: timed(lambda: limits.copy_memory(self._tensors()))
        return contenders

    def _prepare_cache(self, folder: Path, *, cold: bool) -> None:
        synchronize()
        if self._rank == 0:
            files = page_cache.data_files(folder)
            if cold:
                page_cache.evict(files)
                left = page_cache.resident_fraction(files)
                self._cold_left = max(self._cold_left, left)
                if left > _COLD_ENOUGH:
                    raise RuntimeError(f"{left:.0%} of {folder} stayed in the page cache: no cold read")
            else:
                page_cache.warm(files)
        synchronize()
