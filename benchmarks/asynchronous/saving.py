"""Benchmark `async_save`: the wait of training, the time until the commit, and the memory that is kept.

A *life* is a new process (or one per rank). Its first save allocates buffers and starts writers; later saves
reuse them. Each save is committed before the next save starts.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.asynchronous.sides import ASYNC_SIDES, AsyncSide
from benchmarks.machine import limits
from benchmarks.machine.process_tree import PeakMemory, cpu_seconds, resident_mebibytes
from benchmarks.peers import peer_sides
from benchmarks.processes import Progress
from benchmarks.rounds import (
    Measurement,
    Sample,
    busy_seconds,
    max_over_ranks,
    remove_durably,
    rotated,
    sum_over_ranks,
    synchronize,
    timed,
)
from benchmarks.sides import OURS, STOCK
from benchmarks.workloads import State, build_state

__all__ = [
    "CONTENDERS",
    "OPERATIONS",
    "AsyncSpec",
    "async_peers",
    "merge_lives",
    "peak_async_mebibytes",
    "save_in_one_life",
]

OPERATIONS = ("async_save first", "async_save", "async_save committed")
"""The wait of the first and of later saves, and the time until the commit of later saves."""
CONTENDERS = ("ours_thread", "ours_process", "stock", "stock_reused")
_LIMITS = ("memory_copy", "memory_copy_2_threads", "raw_direct_write")
_MEMORY_SAVES = 3


@dataclass(frozen=True)
class AsyncSpec:
    """One life: workload, size, number of saves by each contender after the first, folder."""

    workload: str
    scale: float
    later_saves: int
    life: int
    folder: Path
    contenders: tuple[str, ...] = CONTENDERS


class _Timing(NamedTuple):
    blocked: Sample
    committed: Sample
    cpu_seconds: float


def async_peers(workload: str, ranks: int) -> tuple[str, ...]:
    """Return the installed packages that can save this workload asynchronously."""
    return tuple(peer.name for peer in peer_sides(workload, ranks) if peer.name in ASYNC_SIDES)


def save_in_one_life(rank: int, world_size: int, progress: Progress, spec: AsyncSpec) -> list[Measurement]:
    """Measure `OPERATIONS` in one life; only the result of rank 0 is used."""
    state = build_state(spec.workload, spec.scale, rank=rank, world_size=world_size)
    with closing(_Life(spec, state, rank, progress)) as life:
        return life.run()


def merge_lives(lives: Sequence[list[Measurement]]) -> list[Measurement]:
    """Merge the samples of several lives of one workload."""
    merged = lives[0]
    for life in lives[1:]:
        for into, measured in zip(merged, life, strict=True):
            for name in into.samples:
                into.samples[name] += measured.samples[name]
                into.others[name] += measured.others[name]
            for name, values in measured.facts.get("cpu_seconds", {}).items():
                into.facts["cpu_seconds"][name] += values
    return merged


class _Life:
    def __init__(self, spec: AsyncSpec, state: State, rank: int, progress: Progress) -> None:
        self._spec = spec
        self._state = state
        self._rank = rank
        self._progress = progress
        self._saves = 0
        self._sides: dict[str, AsyncSide] = {name: ASYNC_SIDES[name]() for name in spec.contenders}
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._loads = {peer.name: peer.load for peer in peer_sides(spec.workload, ranks)}
        self._copy = limits.StateCopy(list(state.by_fqn.values()))

    def run(self) -> list[Measurement]:
        """Run the first saves, checked in the first life, then rounds of later saves."""
        spec = self._spec
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        size_bytes, tensors = int(sum_over_ranks(self._state.size_bytes)), len(self._state.by_fqn)
        first, later, committed = results = [
            Measurement(spec.workload, ranks, operation, size_bytes, tensors) for operation in OPERATIONS
        ]
        committed.facts["cpu_seconds"] = {name: [] for name in spec.contenders}
        for name in rotated(spec.contenders, spec.life):
            first.note(name, self._save(name, check=spec.life == 0).blocked)
        first.note("first_copy_2_threads", timed(lambda: self._copy.first_copy(2)))
        for number in range(spec.later_saves):
            for name in rotated((*spec.contenders, *_LIMITS), spec.life + number):
                if name == "memory_copy":
                    later.note(name, timed(self._copy.copy))
                elif name == "memory_copy_2_threads":
                    later.note(name, timed(lambda: self._copy.copy(2)))
                elif name == "raw_direct_write":
                    committed.note(name, self._raw_write())
                else:
                    timing = self._save(name)
                    later.note(name, timing.blocked)
                    committed.note(name, timing.committed)
                    committed.facts["cpu_seconds"][name].append(timing.cpu_seconds)
            self._progress(f"life {spec.life + 1}, round {number + 1}/{spec.later_saves}: {later.latest()}")
        return results

    def close(self) -> None:
        """Release the buffers and writers of the contenders."""
        for side in self._sides.values():
            side.close()

    def _save(self, name: str, *, check: bool = False) -> _Timing:
        folder = self._fresh_folder()
        timing = self._timed_save(self._sides[name], folder)
        if check:
            self._state.wipe()
            load = self._loads.get(name, (STOCK if name.startswith("stock") else OURS).load)
            load(self._state.state_dict, folder)
            if not self._state.is_intact():
                raise RuntimeError(f"{name} saved other bytes than it was given in {self._spec.workload}")
        self._remove(folder)
        return timing

    def _timed_save(self, side: AsyncSide, folder: Path) -> _Timing:
        """Return seconds of the slowest rank. During the save, ranks exchange only the messages of the
        save."""
        gc.collect()
        synchronize()
        busy, own, begun = busy_seconds(), cpu_seconds(), time.perf_counter()
        started = side.start(self._state.state_dict, folder)
        started.wait_until_staged()
        blocked = time.perf_counter() - begun
        started.wait_until_committed()
        elapsed = time.perf_counter() - begun
        own, busy = cpu_seconds() - own, busy_seconds() - busy
        own = sum_over_ranks(own)
        committed = max_over_ranks(elapsed)
        others = max(0.0, busy - own) / committed
        return _Timing(Sample(max_over_ranks(blocked), others), Sample(committed, others), own)

    def _raw_write(self) -> Sample:
        folder = self._fresh_folder()
        if self._rank == 0:
            folder.mkdir()
        sample = timed(lambda: limits.write_direct(folder / str(self._rank), self._state.size_bytes))
        self._remove(folder)
        return sample

    def _fresh_folder(self) -> Path:
        self._saves += 1
        return self._spec.folder / f"save-{self._spec.life}-{self._saves}"

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint durably, outside the timing."""
        synchronize()
        if self._rank == 0:
            remove_durably(folder)
        synchronize()


def peak_async_mebibytes(
    rank: int, world_size: int, progress: Progress, workload: str, scale: float, side_name: str, folder: Path
) -> dict[str, float]:
    """Return MiB beyond the state during and after saves, for this process and its children.

    A tiny save runs first, so that imported modules and the writer process do not count.
    """
    side = ASYNC_SIDES[side_name]()
    tiny = side.start({"weight": torch.zeros(16)}, folder / "tiny")
    tiny.wait_until_committed()
    state = build_state(workload, scale, rank=rank, world_size=world_size)
    gc.collect()
    with PeakMemory() as memory:
        for number in range(_MEMORY_SAVES):
            target = folder / f"save-{number}"
            side.start(state.state_dict, target).wait_until_committed()
            shutil.rmtree(target)
    gc.collect()
    kept = resident_mebibytes() - memory.before
    side.close()
    return {"peak": memory.peak - memory.before, "kept": kept}
