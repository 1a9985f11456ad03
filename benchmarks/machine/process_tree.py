"""What a process and those that it started take of the machine: processor time and memory, by /proc."""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["PeakMemory", "cpu_seconds", "descendants", "resident_mebibytes"]

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SAMPLE_SECONDS = 0.02


def _stat(pid: str) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None once the process has gone."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def descendants(pid: int) -> list[int]:
    """The processes that a living process started, and that those did."""
    return [int(found) for found, _ in _tree(str(pid))[1:]]


def _tree(root: str | None = None) -> list[tuple[str, list[str]]]:
    """A process (this one by default) and its descendants, with the fields of their stat."""
    pids = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = {pid: fields for pid in pids if (fields := _stat(pid)) is not None}
    ours = [root or str(os.getpid())]
    for parent in ours:  # grows while it is walked
        ours += [pid for pid, fields in found.items() if fields[1] == parent]
    return [(pid, found[pid]) for pid in ours if pid in found]


def cpu_seconds(pid: int | None = None) -> float:
    """Of a process (this one by default) and its living descendants since they started, user and system."""
    root = None if pid is None else str(pid)
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in _tree(root))
    return ticks / _TICKS_PER_SECOND


def resident_mebibytes() -> float:
    """Of this process and its descendants; what several of them map counts once (the sum of their PSS)."""
    kibibytes = 0
    for pid, _ in _tree():
        try:
            lines = Path("/proc", pid, "smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kibibytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kibibytes / 1024


class PeakMemory:
    """Within the context, the largest of `resident_mebibytes`, looked at every 20 milliseconds or so."""

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
