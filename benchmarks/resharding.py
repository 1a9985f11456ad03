"""R1: load a checkpoint of four ranks on other numbers of ranks, and along the other dimension."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.machine import page_cache
from benchmarks.processes import Progress
from benchmarks.rounds import Timings, rotated, sum_over_ranks, synchronize, timed
from benchmarks.sides import OURS, STOCK
from benchmarks.workloads import build_state

__all__ = ["CASES", "Resharding", "load_resharded", "save_for_resharding"]

CASES = ((1, 0), (2, 0), (8, 0), (4, 1))
"""(ranks, dimension) of the loads."""
SAVING_RANKS = 4
_WORKLOAD = "W1"


@dataclass
class Resharding(Timings):
    """Timings of one warm case, and the ratio of bytes read to bytes needed."""

    ranks: int
    dim: int
    size_bytes: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    others: dict[str, list[float]] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)
    """Over all ranks, as the kernel counts them (rchar), metadata included."""


def save_for_resharding(rank: int, world_size: int, progress: Progress, scale: float, folder: Path) -> None:
    """Save the checkpoints of both contenders, sharded on dimension 0."""
    state = build_state(_WORKLOAD, scale, rank=rank, world_size=world_size)
    for side in (OURS, STOCK):
        progress(f"saving with {side.name}")
        side.save(state.state_dict, folder / side.name, True)


def load_resharded(
    rank: int, world_size: int, progress: Progress, scale: float, rounds: int, dim: int, folder: Path
) -> Resharding:
    """Run the rounds of one case; check the first, untimed loads byte by byte."""
    state = build_state(_WORKLOAD, scale, rank=rank, world_size=world_size, dim=dim)
    result = Resharding(world_size, dim, int(sum_over_ranks(state.size_bytes)))
    sides = {side.name: side for side in (OURS, STOCK)}
    for side in sides.values():
        _warm(rank, folder / side.name)
        state.wipe()
        side.load(state.state_dict, folder / side.name)
        if not state.is_intact():
            raise RuntimeError(f"{side.name} loaded other bytes than were saved")
    for number in range(rounds):
        for name in rotated(list(sides), number):
            _warm(rank, folder / name)
            before = _bytes_read_so_far()
            result.note(name, timed(partial(sides[name].load, state.state_dict, folder / name)))
            result.bytes_read[name] = int(sum_over_ranks(_bytes_read_so_far() - before))
        progress(f"round {number + 1}/{rounds}: {result.latest()}")
    return result


def _warm(rank: int, folder: Path) -> None:
    synchronize()
    if rank == 0:
        page_cache.warm(page_cache.data_files(folder))
    synchronize()


def _bytes_read_so_far() -> int:
    """Return the bytes of all read calls of this process, from the page cache or the disk."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no rchar")
