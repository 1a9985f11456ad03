"""A folder of small notes that outlive the process which wrote them. Torch-free."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dcp.storage.stores.posix.refusals import sync_folder

__all__ = ["MAX_NOTE_BYTES", "Note", "Spool"]

logger = logging.getLogger(__name__)

MAX_NOTE_BYTES: Final = 64 << 10

_NAME: Final = re.compile(r"[0-9]{20}-[0-9a-f]{8}-[0-9]{6,}\.json")
_ASIDE: Final = re.compile(r"\.tmp-[0-9]{20}-.*")
_STALE_SECONDS: Final = 3600.0


@dataclass(eq=False, slots=True)
class Note:
    """``body`` is what it says, ``path`` where it lies, None if it is in memory only. What was ``refused``
    comes again when it is ``due`` (of the monotonic clock)."""

    body: Mapping[str, Any]
    path: Path | None = None
    refusals: int = 0
    due: float = 0.0

    @property
    def key(self) -> str:
        """What it is about."""
        return f"{self.body.get('root') or self.body.get('root_url')}\0{self.body.get('key')}"


class Spool:
    """Notes in ``folder``, ``limit`` at most: each is one file, written aside, made durable and renamed.

    Several processes may share a folder; each loads what is there when it starts. Nothing raises: what cannot
    be written stays in memory, and is logged once.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self._limit = limit
        self._own = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._is_told = False

    def load(self) -> list[Note]:
        """The notes that are there, the oldest first; unreadable ones are removed, and too many of them."""
        found: list[Note] = []
        try:
            names = sorted(os.listdir(self.folder))  # noqa: PTH208 - names only
        except FileNotFoundError:
            return []
        except OSError as error:
            self._tell(error)
            return []
        for name in names:
            if _ASIDE.fullmatch(name):
                self._remove_stale(self.folder / name)
            elif _NAME.fullmatch(name):
                found.append(Note({}, self.folder / name))
        for note in found[: -self._limit]:
            self.remove(note)
        return [note for note in found[-self._limit :] if self._read(note)]

    def add(self, notes: Sequence[Note]) -> None:
        """Put ``notes`` on disk, as far as that works."""
        added = 0
        for note in notes:
            data = json.dumps(note.body).encode()
            if len(data) <= MAX_NOTE_BYTES:
                added += self._add(note, data)
        if added:
            try:
                sync_folder(self.folder)
            except OSError as error:
                self._tell(error)

    def _add(self, note: Note, data: bytes) -> bool:
        name = f"{time.time_ns():020d}-{self._own}-{next(self._numbers):06d}.json"
        aside = self.folder / f".tmp-{name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with aside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(self.folder / name)
        except OSError as error:
            self._tell(error)
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            return False
        note.path = self.folder / name
        return True

    def remove(self, note: Note) -> None:
        """It has arrived, or will never."""
        if note.path is None:
            return
        try:
            note.path.unlink(missing_ok=True)
        except OSError as error:
            self._tell(error)

    def _read(self, note: Note) -> bool:
        assert note.path is not None
        try:
            with note.path.open("rb") as file:
                body = json.loads(file.read(MAX_NOTE_BYTES + 1))
        except (OSError, ValueError):
            body = None
        if isinstance(body, dict) and isinstance(body.get("key"), str):
            note.body = body
            return True
        self.remove(note)
        return False

    def _remove_stale(self, path: Path) -> None:
        """What a killed writer left; a living one writes it for a moment only."""
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()

    def _tell(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "%s: notes to the catalog cannot be kept on disk (%s); they are in memory only",
                self.folder,
                error,
            )
