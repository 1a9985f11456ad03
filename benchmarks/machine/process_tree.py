"""Processor time and memory of a process and its descendants, from /proc."""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["PeakMemory", "cpu_seconds", "descendants", "resident_mebibytes"]

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SAMPLE_SECONDS = 0.02


def _stat(pid: str) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on, or None if the process has ended."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def descendants(pid: int) -> list[int]:
    """Return the descendants of a living process."""
    return [int(found) for found, _ in _tree(str(pid))[1:]]


def _tree(root: str | None = None) -> list[tuple[str, list[str]]]:
    """Return a process (default: this one) and its descendants with their stat fields."""
    pids = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = {pid: fields for pid in pids if (fields := _stat(pid)) is not None}
    ours = [root or str(os.getpid())]
    for parent in ours:  # grows during the loop
        ours += [pid for pid, fields in found.items() if fields[1] == parent]
    return [(pid, found[pid]) for pid in ours if pid in found]


def cpu_seconds(pid: int | None = None) -> float:
    """Return user and system seconds of a process (default: this one) and its living descendants."""
    root = None if pid is None else str(pid)
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in _tree(root))
    return ticks / _TICKS_PER_SECOND


def resident_mebibytes() -> float:
    """Return MiB of this process and its descendants (sum of PSS: shared pages count once)."""
    kibibytes = 0
    for pid, _ in _tree():
        try:
            lines = Path("/proc", pid, "smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kibibytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kibibytes / 1024


class PeakMemory:
    """Record the largest `resident_mebibytes` within the context, sampled every 20 milliseconds."""

    def __init__(self) -> None:
        self.before = resident_mebibytes()
        self.peak = self.before
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, resident_mebibytes())

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, resident_mebibytes())
