"""Inspection of running processes, each of which may end at any moment.

A process may end between opening and reading a file below /proc. The error then differs from that of a
process that never existed.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = [
    "busy_seconds",
    "caught_signals",
    "children",
    "command_of",
    "environment_of",
    "lives",
    "mapped_files",
    "open_files",
    "parent_of",
    "rename_process",
]

_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
_MAP: Final = struct.Struct("=12Q2I")
_BOUNDS: Final = (slice(23, 25), slice(42, 44), slice(44, 45), slice(25, 26))
"""Bounds of code, data, heap and stack, as fields of /proc/PID/stat counted from the state."""

_named: Final[list[ctypes.Array[ctypes.c_char]]] = []


def lives(pid: int) -> bool:
    """Return True for an existing process other than a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def busy_seconds() -> float:
    """Return the seconds that threads of this process used or waited for a core."""
    nanoseconds = 0
    for task in list(Path("/proc/self/task").iterdir()):
        with suppress(FileNotFoundError, ProcessLookupError):
            running, waiting, _ = (task / "schedstat").read_text().split()
            nanoseconds += int(running) + int(waiting)
    return nanoseconds / 1e9


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None for a gone process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def children(pid: int) -> list[int]:
    """Return unreaped children of all threads of a process."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


def caught_signals(pid: int) -> set[int]:
    """Return the numbers of the signals that a process handles."""
    lines = _content(pid, "status").decode(errors="replace").splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return {number for number in range(1, 65) for mask in masks if mask >> (number - 1) & 1}


def environment_of(pid: int) -> bytes:
    """Return the initial environment of a process; empty for an ended process or another user's."""
    return _content(pid, "environ")


def command_of(pid: int) -> str:
    """Return the command line of a process; empty for an ended process or another user's."""
    return _content(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def rename_process(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Set the command line and environment of this process below /proc. OSError if the system refuses."""
    ends = []
    for parts in (command, [f"{name}={value}" for name, value in environment.items()]):
        text = b"".join(os.fsencode(part) + b"\0" for part in parts)
        _named.append(ctypes.create_string_buffer(text, len(text)))
        ends += [ctypes.addressof(_named[-1]), ctypes.addressof(_named[-1]) + len(text)]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    fields = _stat(os.getpid())
    code, data, heap, stack = (list(map(int, fields[part])) for part in _BOUNDS)
    bounds = [*code, *data, *heap, libc.sbrk(0), *stack, *ends]
    packed = _MAP.pack(*bounds, 0, 0, 0xFFFFFFFF)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, packed, len(packed), 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")


def mapped_files() -> list[str]:
    """Return the mappings of this process, one line each."""
    return Path("/proc/self/maps").read_text().splitlines()


def open_files(pid: int | str = "self") -> list[str]:
    """Return the targets of a process's descriptors, without descriptors closed in the meantime."""
    links = []
    for path in list(Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError, ProcessLookupError):
            links.append(str(path.readlink()))
    return links


def _stat(pid: int) -> list[str]:
    """Return the fields from the state on; empty for an ended process."""
    return _content(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _content(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return b""
