"""Symbolic links below a root: those that stay in it are followed, and what they lead to is found once."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dcp.storage.stores.base import FileInfo
from dcp.storage.stores.posix.files import is_below

__all__ = ["LinkedFile", "LinkedFolder", "Links", "Refused"]

_NOWHERE: Final = "links that lead nowhere"
_CIRCLE: Final = "links that lead in a circle"
_OUT: Final = "links that lead out of the root, which are not followed"


@dataclass(frozen=True, slots=True)
class LinkedFile:
    """A file by the name of the link; ``is_found_anyway``: it is found where it is, too."""

    info: FileInfo
    is_found_anyway: bool


@dataclass(frozen=True, slots=True)
class LinkedFolder:
    """A folder that is not found where it is; ``path`` has no link in it."""

    path: str


@dataclass(frozen=True, slots=True)
class Refused:
    """``why`` it is not followed. ``hides``: there is something behind it, of which nothing is known."""

    why: str
    hides: bool


class Links:
    """The links of one walk over the root at ``base``.

    ``is_found`` says whether the walk comes by a key by itself, of a folder or (second argument) of a file.
    """

    def __init__(self, base: str, is_found: Callable[[str, bool], bool]) -> None:
        self._base = os.path.realpath(base)
        self._is_found = is_found
        self._entered: set[tuple[int, int]] = set()

    def resolve(self, path: str, name: str, *, counts: bool) -> LinkedFile | LinkedFolder | Refused | None:
        """What the link at ``path`` is; None if nobody needs to know. A file only if its name ``counts``.

        A folder that the walk finds by itself is not found twice; one that it does not is for `enter`.
        """
        real = os.path.realpath(path)
        try:
            status = os.lstat(real)
        except OSError:
            return Refused(_NOWHERE, hides=False)
        if stat.S_ISLNK(status.st_mode):
            return Refused(_CIRCLE, hides=False)
        is_folder = stat.S_ISDIR(status.st_mode)
        if not is_folder and not (counts and stat.S_ISREG(status.st_mode)):
            return None
        if real == self._base:
            return None
        if not is_below(real, self._base):
            return Refused(_OUT, hides=True)
        key = os.path.relpath(real, self._base)
        if not is_folder:
            info = FileInfo(name, status.st_size, status.st_mtime)
            return LinkedFile(info, self._is_found(key, True))
        return None if self._is_found(key, False) else LinkedFolder(real)

    def enter(self, path: str) -> bool:
        """Whether the folder, which is behind a link, has not been entered yet."""
        try:
            status = os.lstat(path)
        except OSError:
            return False
        before = len(self._entered)
        self._entered.add((status.st_dev, status.st_ino))
        return len(self._entered) > before
