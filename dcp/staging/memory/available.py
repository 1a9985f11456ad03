"""How much memory this process may still take, by the machine and by its control group."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """About how many bytes can be had before the system kills a process; None where it does not say."""
    known = [free for free in (_of_machine(), *_of_cgroups()) if free is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    fields = _fields(_PROC / "meminfo")
    if "MemAvailable:" not in fields:
        return None
    return (fields["MemAvailable:"] + fields.get("SwapFree:", 0)) * 1024


def _of_cgroups() -> list[int | None]:
    """What is left in each control group (version 2) from this process's own up to the root: each may have
    a limit."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    group = _CGROUPS / path.strip("/")
    return [_of_cgroup(folder) for folder in (group, *group.parents) if folder.is_relative_to(_CGROUPS)]


def _of_cgroup(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    stat = _fields(folder / "memory.stat")
    # what files of the disk occupy is given back on demand
    reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return max(0, int(limit) - used + reclaimable)


def _fields(path: Path) -> dict[str, int]:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}
