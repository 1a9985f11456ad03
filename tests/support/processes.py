"""What a process has open, looked at while its threads go on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["mapped_files", "open_files"]


def mapped_files(pid: int | str = "self") -> list[str]:
    """What a process maps, a line for each mapping."""
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def open_files(pid: int | str = "self") -> list[str]:
    """Where the descriptors of a process lead; one that is closed meanwhile is left out."""
    links = []
    for path in list(Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    return links
