"""Facts that the demo and the ranks of its jobs exchange: process numbers, and when a rank is to die."""

from __future__ import annotations

from pathlib import Path

__all__ = ["KILL_VARIABLE", "rank_note", "start_ticks"]

KILL_VARIABLE = "DCP_DEMO_KILL_AT"
"""``STEP:N``: in the save of training step STEP, every rank dies before its Nth write to its data file (on an
object store before the Nth part of it is sent).
``STEP:staged``: every rank dies once all have handed the state of STEP over to their writer processes."""

_STATE, _START_TICKS = 0, 19
"""Fields of ``/proc/PID/stat`` behind the command's name."""


def rank_note(results: Path, rank: int) -> Path:
    """The file in which a rank notes its process number and `start_ticks`."""
    return results / f"rank-{rank}.pid"


def start_ticks(pid: int) -> int | None:
    """The clock tick at which a process started, which tells it from a later one of its number; None if it
    has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] in ("Z", "X") else int(fields[_START_TICKS])
