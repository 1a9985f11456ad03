"""Benchmark planning a save of 5,000 tensors on 4 ranks, first and repeated, until the slowest rank has
its plan.

Two layouts: every tensor sharded over the ranks, and every tensor replicated on all ranks, where dcphub also
compares the replicas. dcphub repeats a plan with a reused writer, stock with its plan caching.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp
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
)

__all__ = ["LAYOUTS", "TENSORS", "PlanSpec", "plan_again"]

LAYOUTS = ("sharded", "replicated")
TENSORS = 5000
TENSOR_BYTES = 1024
_KEYS_PER_LAYER = 10
_PHASES = ("local_plan", "digests", "global_plan")


@dataclass(frozen=True)
class PlanSpec:
    """A job: layout, number of tensors, number of rounds, folder of the checkpoints."""

    layout: str
    tensors: int
    rounds: int
    folder: Path


class _StockWriter(stock.FileSystemWriter):
    """Record the time at which planning ended."""

    planned_at = 0.0

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        self.planned_at = time.perf_counter()
        return super().write_data(*args, **kwargs)


def plan_again(rank: int, world_size: int, progress: Progress, spec: PlanSpec) -> list[Measurement]:
    """Measure first and repeated planning; only the result of rank 0 is used."""
    return _Planning(spec, rank, world_size, progress).run()


class _Planning:
    def __init__(self, spec: PlanSpec, rank: int, world_size: int, progress: Progress) -> None:
        self._spec = spec
        self._rank = rank
        self._progress = progress
        self._values = _tensors(spec, world_size)
        self._saves = 0
        self._kept = dcp.FileSystemWriter(spec.folder / "none", sync_files=False)
        self._phases: dict[str, list[float]] = {phase: [] for phase in _PHASES}
        size = int(sum_over_ranks(sum(map(_local_bytes, self._values))))
        self._first, self._again = (
            Measurement("plan", world_size, f"{operation}, {spec.layout}", size, spec.tensors)
            for operation in ("plan first", "plan again")
        )

    def run(self) -> list[Measurement]:
        """Run rounds of all contenders after one round that fills the plan caches and does not count."""
        contenders = {
            "ours first": (self._first, "ours", self._ours_first),
            "stock first": (self._first, "stock", self._stock_first),
            "ours again": (self._again, "ours", self._ours_again),
            "stock again": (self._again, "stock", self._stock_again),
        }
        for number in range(-1, self._spec.rounds):
            for name in rotated(list(contenders), number):
                measured, side, save = contenders[name]
                sample = self._timed(save)
                if number >= 0:
                    measured.note(side, sample)
                    if name == "ours again" and self._rank == 0:
                        self._note_phases()
            if number >= 0:
                again = self._again.samples
                text = ", ".join(f"{side} {values[-1] * 1e3:.1f} ms" for side, values in again.items())
                self._progress(f"round {number + 1}/{self._spec.rounds}: again {text}")
        if self._rank == 0:
            medians = {phase: statistics.median(values) for phase, values in self._phases.items()}
            self._again.facts.update({f"{phase}_seconds": value for phase, value in medians.items()})
            text = ", ".join(f"{phase} {value * 1e3:.1f} ms" for phase, value in medians.items())
            self._progress(f"ours again, slowest rank, median: {text}")
        return [self._first, self._again]

    def _timed(self, save: Callable[[dict[str, Any], Path], float]) -> Sample:
        """Return the planning seconds that ``save`` reports; ranks start together after a garbage
        collection."""
        self._saves += 1
        folder, state = self._spec.folder / f"{self._spec.layout}-{self._saves}", self._state_dict()
        gc.collect()
        synchronize()
        busy, own, begun = busy_seconds(), time.process_time(), time.perf_counter()
        seconds = max_over_ranks(save(state, folder))
        elapsed, own = time.perf_counter() - begun, time.process_time() - own
        others = max(0.0, busy_seconds() - busy - sum_over_ranks(own)) / max_over_ranks(elapsed)
        if self._rank == 0:
            remove_durably(folder)
        synchronize()
        return Sample(seconds, others)

    def _state_dict(self) -> dict[str, Any]:
        """Return new names and new detached tensors, as ``state_dict()`` of a module does."""
        return {_name(number): value.detach() for number, value in enumerate(self._values)}

    def _note_phases(self) -> None:
        for phase, values in self._phases.items():
            values.append(max(rank.get(phase, 0.0) for rank in _rank_seconds(self._kept)))

    def _ours_first(self, state: dict[str, Any], folder: Path) -> float:
        return self._ours(state, dcp.FileSystemWriter(folder, sync_files=False))

    def _ours_again(self, state: dict[str, Any], folder: Path) -> float:
        self._kept.reset(folder)
        return self._ours(state, self._kept)

    def _ours(self, state: dict[str, Any], writer: dcp.FileSystemWriter) -> float:
        dcp.save(state, storage_writer=writer)
        return max((seconds["plan"] for seconds in _rank_seconds(writer)), default=0.0)

    def _stock_first(self, state: dict[str, Any], folder: Path) -> float:
        return self._stock(state, folder, caching=False)

    def _stock_again(self, state: dict[str, Any], folder: Path) -> float:
        return self._stock(state, folder, caching=True)

    def _stock(self, state: dict[str, Any], folder: Path, *, caching: bool) -> float:
        writer = _StockWriter(folder, sync_files=False)
        planner = stock.DefaultSavePlanner(enable_plan_caching=caching)
        begun = time.perf_counter()
        stock.save(state, storage_writer=writer, planner=planner)
        return writer.planned_at - begun


def _rank_seconds(writer: dcp.FileSystemWriter) -> list[dict[str, float]]:
    """Return the seconds by rank from the published manifest, on the coordinator only."""
    return [] if writer.index is None else list(writer.index.provenance["rank_seconds"])


def _name(number: int) -> str:
    return f"model.layers.{number // _KEYS_PER_LAYER}.part{number % _KEYS_PER_LAYER}.weight"


def _tensors(spec: PlanSpec, world_size: int) -> list[torch.Tensor]:
    columns = 4
    rows = TENSOR_BYTES // 4 // columns
    if spec.layout == "replicated":
        return [torch.full((rows, columns), float(number)) for number in range(spec.tensors)]
    mesh = init_device_mesh("cpu", (world_size,))
    rows = max(1, rows // world_size)
    return [
        DTensor.from_local(torch.full((rows, columns), float(number)), mesh, [Shard(0)], run_check=False)
        for number in range(spec.tensors)
    ]


def _local_bytes(value: torch.Tensor) -> int:
    """Return the bytes of a tensor that this rank counts: replicas count once."""
    if isinstance(value, DTensor):
        return value.to_local().nbytes
    return value.nbytes if dist.get_rank() == 0 else 0
