"""Folders for what tasks cannot stream: of one process each, and removed after it, however it ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Final

__all__ = ["WorkFolders"]

_PREFIX: Final = "dcp-work-"
_LOCK: Final = ".lock"


class WorkFolders:
    """Makes folders below ``base`` (the system's temporary folder, if None), in one that this process holds.

    What processes that were killed have left there is removed when the first one is made. One that others
    have removed is made again: a process that looks just before it is locked takes it for one that is left,
    and what clears temporary folders goes by their age.
    """

    def __init__(self, base: Path | None) -> None:
        self._base = Path(tempfile.gettempdir()) if base is None else base
        self._own: Path | None = None
        self._lock_fd = -1
        self._mutex = threading.Lock()

    def make(self) -> Path:
        """A new, empty one."""
        with self._mutex:
            while self._own is None or not (self._own / _LOCK).exists():
                self._give_up()
                self._begin()
            return Path(tempfile.mkdtemp(prefix="task-", dir=self._own))

    def _begin(self) -> None:
        self._base.mkdir(parents=True, exist_ok=True)
        self._remove_left()
        self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._base))
        self._lock_fd = os.open(self._own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove all of them."""
        with self._mutex:
            self._give_up()

    def _give_up(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
        if self._lock_fd >= 0:  # there is none where the disk was full, or too many files open
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_left(self) -> None:
        for folder in self._base.glob(f"{_PREFIX}*"):
            try:
                fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:  # another program's, or just being made
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
