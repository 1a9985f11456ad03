"""States of a folder after a power cut: each unsynced write and change of a name is either present or lost.

A `Recording` notes the operations below a folder in order, with the changes made durable by each fsync. Its
`images` are possible states at any instant: all unsynced changes are present, none, all but one, or one
alone. A rename is a single change.

File systems promise more order than this model, so a property of the model also holds on file systems.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

__all__ = ["Recording"]

_CALLS: Final = (
    "open",
    "write",
    "pwrite",
    "pwritev",
    "ftruncate",
    "posix_fallocate",
    "rename",
    "replace",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
)
_SYNCS: Final = ("fsync", "fdatasync")

_Entries = dict[tuple[int, str], int]
"""Names: (folder, name) -> number of the file or folder; the recorded folder is 0."""


@dataclass
class _Change:
    """The change by a call: names (None: removed), or the content of a file."""

    call: str
    names: dict[tuple[int, str], int | None] = field(default_factory=dict)
    file: int | None = None
    content: bytes = b""

    @property
    def objects(self) -> set[int]:
        """The objects whose fsync makes the change durable: either folder of a rename between folders."""
        return {self.file} if self.file is not None else {folder for folder, _ in self.names}


class Recording:
    """A record of this process's changes below ``root`` during the block. Files present before are
    durable."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._log: list[_Change | int] = []  # a number: fsync of this file or folder
        self._numbers: dict[int, int] = {}
        self._next = 1
        self._folders: set[int] = {0}
        self._entries: _Entries = {}
        self._contents: dict[int, bytes] = {}
        self._before: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        self._look("before")
        self._log.clear()
        self._first_entries, self._first_contents = dict(self._entries), dict(self._contents)
        for name in (*_CALLS, *_SYNCS):
            self._before.append(self._patch(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in self._before:
            undo()
        self._look("after")

    def _patch(self, name: str) -> Callable[[], None]:
        real = getattr(os, name)

        def patched(*args: Any, **options: Any) -> Any:
            with self._lock:
                if name in _SYNCS:
                    self._look("unseen")  # a change without an observed call, such as by an extension module
                result = real(*args, **options)
                if name in _SYNCS:
                    number = self._numbers.get(os.fstat(args[0]).st_ino)
                    if number is not None:
                        self._log.append(number)
                else:
                    self._look(name)
            return result

        setattr(os, name, patched)
        return lambda: setattr(os, name, real)

    def _look(self, call: str) -> None:
        """Note what has changed since the last look."""
        entries: _Entries = {}
        paths: dict[int, Path] = {}
        self._walk(self._root, 0, entries, paths)
        self._numbers = {ino: number for ino, number in self._numbers.items() if number in paths}
        keys = {*entries, *self._entries}
        names = {key: entries.get(key) for key in keys if entries.get(key) != self._entries.get(key)}
        if names:
            self._log.append(_Change(call, names))
        for number, path in paths.items():
            if number in self._folders:
                continue
            content = path.read_bytes()
            if content != self._contents.get(number, b""):
                self._log.append(_Change(call, file=number, content=content))
            self._contents[number] = content
        self._entries = entries

    def _walk(self, folder: Path, number: int, entries: _Entries, paths: dict[int, Path]) -> None:
        self._numbers[folder.stat().st_ino] = number
        paths[number] = folder
        for entry in os.scandir(folder):
            inode = entry.inode()
            if inode not in self._numbers:  # numbers are never reused, inodes are
                self._numbers[inode] = self._next
                self._next += 1
            own = self._numbers[inode]
            entries[number, entry.name] = own
            paths[own] = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                self._folders.add(own)
                self._walk(Path(entry.path), own, entries, paths)

    # -- possible states -------------------------------------------------------------------------------------

    def images(self, *, at_end: bool = False) -> Iterator[tuple[str, Callable[[Path], None]]]:
        """Yield each possible state once: (name, function that replaces the content of a folder).

        ``at_end``: only states of cuts after all recorded operations.
        """
        seen = set()
        for end in range(len(self._log) if at_end else 0, len(self._log) + 1):
            changes, loose = self._until(end)
            for name, lost in _losses(loose, [change.call for change in changes]):
                image = self._image(changes, lost)
                if (key := hash(image)) not in seen:
                    seen.add(key)
                    last = changes[-1].call if changes else "nothing"
                    yield f"cut {end} after {last}: {name}", _maker(image)

    def _until(self, end: int) -> tuple[list[_Change], list[int]]:
        """Return the changes before the cut, and the indices of those that no fsync has made durable."""
        changes: list[_Change] = []
        loose: list[int] = []
        for noted in self._log[:end]:
            if isinstance(noted, int):
                loose = [place for place in loose if noted not in changes[place].objects]
            else:
                loose.append(len(changes))
                changes.append(noted)
        return changes, loose

    def _image(self, changes: list[_Change], lost: frozenset[int]) -> tuple[tuple[str, bytes | None], ...]:
        """Return (path, content; None for a folder), in order."""
        entries, contents = dict(self._first_entries), dict(self._first_contents)
        for place, change in enumerate(changes):
            if place in lost:
                continue
            if change.file is not None:
                contents[change.file] = change.content
            for key, number in change.names.items():
                if number is None:
                    entries.pop(key, None)
                else:
                    entries[key] = number
        found: list[tuple[str, bytes | None]] = []

        def walk(folder: int, path: str) -> None:
            for (owner, name), number in sorted(entries.items()):
                if owner == folder:
                    is_folder = number in self._folders
                    found.append((path + name, None if is_folder else contents.get(number, b"")))
                    if is_folder:
                        walk(number, f"{path}{name}/")

        walk(0, "")
        return tuple(found)


def _losses(loose: list[int], calls: list[str]) -> Iterator[tuple[str, frozenset[int]]]:
    everything = frozenset(loose)
    yield "nothing is lost", frozenset()
    yield "all that was not synced is lost", everything
    for one in loose:
        yield f"{calls[one]} {one} is lost", frozenset({one})
        yield f"of what was not synced, {calls[one]} {one} alone is there", everything - {one}


def _maker(image: tuple[tuple[str, bytes | None], ...]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in image:
            if content is None:
                (folder / name).mkdir()
            else:
                (folder / name).write_bytes(content)

    return make
