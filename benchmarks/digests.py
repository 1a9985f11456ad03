"""What digests cost a save: of large tensors and of small ones, durable and into the page cache.

One process saves with and without in turn. Beside the seconds stand those of all cores, which say the same on
a machine that has other work.
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
    """Which workload at which size, how many rounds, where the checkpoints go."""

    workload: str
    scale: float
    rounds: int
    folder: Path


def save_with_digests(rank: int, world_size: int, progress: Progress, spec: DigestsSpec) -> list[Measurement]:
    """Rounds of saves with digests ("ours") and without ("without"), after one that is not counted."""
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
    """Seconds beside those without, and what the 5 % allow."""
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
