"""Peak memory of a save or load beyond the state, as counted by the kernel."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import torch

from benchmarks.processes import Progress
from benchmarks.sides import OURS, STOCK
from benchmarks.workloads import build_state

__all__ = ["peak_mebibytes"]


def peak_mebibytes(
    rank: int, world_size: int, progress: Progress, workload: str, scale: float, side_name: str, folder: Path
) -> dict[str, float]:
    """Return MiB beyond the state for one save and one load of a contender in its own process.

    A tiny save and load run first, so that imported modules do not count.
    """
    side = {side.name: side for side in (OURS, STOCK)}[side_name]
    tiny = {"weight": torch.zeros(16)}
    side.save(tiny, folder / "tiny", True)
    side.load(tiny, folder / "tiny")
    state = build_state(workload, scale, rank=rank, world_size=world_size)
    target = folder / "peak"
    gc.collect()
    before = _reset_peak()
    side.save(state.state_dict, target, True)
    peaks = {"save": _peak_kibibytes() - before}
    gc.collect()
    before = _reset_peak()
    side.load(state.state_dict, target)
    peaks["load"] = _peak_kibibytes() - before
    shutil.rmtree(target)
    return {name: kibibytes / 1024 for name, kibibytes in peaks.items()}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


def _reset_peak() -> int:
    """Reset the peak; return the KiB that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_kibibytes() -> int:
    return _status("VmHWM")
