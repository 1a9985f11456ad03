"""Benchmark the cost of digests in saves of large and of small tensors, durable and to the page cache.

One process saves with and without digests in turn. Processor time is reported beside wall time, because it is
stable on a shared machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dcp
from benchmarks.processes import Progress
from benchmarks.rounds import Measurement, Sample, remove_durably, timed
from benchmarks.targets import Promise, Row, Spread, others_cores, ratios
from benchmarks.workloads import build_state

__all__ = ["WORKLOADS", "DigestsSpec", "digests_row", "save_with_digests"]

WORKLOADS = ("W1", "W2")
_OPERATIONS = {"save durable": True, "save": False}
_AT_MOST = 1.05


@dataclass(frozen=True)
class DigestsSpec:
    """A job: workload, size, number of rounds, folder of the checkpoints."""

    workload: str
    scale: float
    rounds: int
    folder: Path


def save_with_digests(rank: int, world_size: int, progress: Progress, spec: DigestsSpec) -> list[Measurement]:
    """Run rounds of saves with digests ("ours") and without ("without"), after one round that does not
    count."""
    state = build_state(spec.workload, spec.scale, rank=rank, world_size=world_size)
    results = {
        name: Measurement(
            spec.workload,
            1,
            f"{name}, digests",
            state.size_bytes,
            len(state.by_fqn),
            facts={"cpu_seconds": {}},
        )
        for name in _OPERATIONS
    }
    for number in range(-1, spec.rounds):
        for name, result in results.items():
            save = partial(
                _save, state.state_dict, spec.folder, _OPERATIONS[name], result.facts["cpu_seconds"]
            )
            contenders = {"ours": partial(save, "ours"), "without": partial(save, "without")}
            if number < 0:
                for warm in contenders.values():
                    warm()
                result.facts["cpu_seconds"].clear()
                continue
            result.take(number, contenders)
            spent = ", ".join(f"{side} {cpu[-1]:.3f}" for side, cpu in result.facts["cpu_seconds"].items())
            progress(f"round {number + 1}/{spec.rounds}: {name} {result.latest()}; of all cores {spent}")
    return [*results.values()]


def _save(
    state_dict: dict[str, Any], folder: Path, durable: bool, spent: dict[str, list[float]], side: str
) -> Sample:
    def save() -> None:
        writer = dcp.FileSystemWriter(folder / "one", sync_files=durable, digests=side == "ours")
        dcp.save(state_dict, storage_writer=writer)

    begun = time.process_time()
    sample = timed(save)
    spent.setdefault(side, []).append(time.process_time() - begun)
    remove_durably(folder / "one")
    return sample


def digests_row(measured: Measurement) -> Row:
    """Return the row of saves with digests; the limit is the save without digests plus 5 %."""
    ours, without = measured.samples["ours"], measured.samples["without"]
    row = Row(
        measured.workload,
        measured.ranks,
        measured.operation,
        measured.size_bytes / 1e9,
        Spread.of(ours),
        limit_name="without",
        limit=Spread.of(without),
        of_limit=ratios(without, ours).median,
        times_limit=ratios(ours, without).median,
        others=others_cores(measured.others),
    )
    return row.judge((Promise("times_limit", _AT_MOST),))
