"""Cursor of a consumer of a run: the steps that it has acknowledged and its holder, in one small file, so
that the next one continues after a kill.

The file has what was acknowledged, and its holder, who writes it anew with another beat every few seconds.
Each change compares and replaces, so that one of two holders finds out at its next change that it has lost
the file. A holder lives as long as its beat changes; no clock of another machine is believed. Torch-free.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    OptionError,
    StorageError,
    UnsupportedFormatError,
)
from dcp.storage.stores.base import Store, Version

__all__ = ["Acknowledged", "Cursor", "start_ticks"]

logger = logging.getLogger(__name__)

_LEASE_SECONDS: Final = 30.0
"""A holder whose beat has not gone on for so long is gone."""

_BEATS_A_LEASE: Final = 3
_LOOK_SECONDS: Final = 0.5
_KIND: Final = "dcphub.cursor"
_VERSION: Final = 1
_LIMIT_BYTES: Final = 64 << 20
_ATTEMPTS: Final = 8
_GONE_STEPS: Final = 1000
"""Acknowledged steps that are not there any more, and still remembered: a listing may be some seconds old."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The commit ``save_id`` of a step. ``stamp``: how its commit objects were listed, where that tells it
    from every other commit there, else ""."""

    save_id: str
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class _Content:
    holder: dict[str, Any] | None = None
    beat: int = 0
    acknowledged: dict[int, Acknowledged] = field(default_factory=dict)

    def encode(self) -> bytes:
        steps = {str(step): [one.save_id, one.stamp] for step, one in self.acknowledged.items()}
        return json.dumps(
            {
                "kind": _KIND,
                "version": _VERSION,
                "holder": self.holder,
                "beat": self.beat,
                "acknowledged": steps,
            }
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> _Content:
        """Undo `encode`. Raises CheckpointFormatError for what `encode` does not write,
        UnsupportedFormatError for what a newer one may."""
        try:
            fields = json.loads(data)
            is_ours = fields["kind"] == _KIND
            version = int(fields["version"])
        except (ValueError, TypeError, KeyError, RecursionError):
            is_ours, version = False, 0
        if not is_ours:
            raise CheckpointFormatError("the file is no cursor of dcphub")
        if version > _VERSION:
            raise UnsupportedFormatError(f"a newer dcphub wrote this cursor ({version})", version=version)
        try:
            steps = {
                int(step): Acknowledged(str(one[0]), str(one[1]))
                for step, one in fields["acknowledged"].items()
            }
            holder = fields["holder"]
            return cls(None if holder is None else dict(holder), int(fields["beat"]), steps)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise CheckpointFormatError(f"the cursor is damaged: {error}") from error


class Cursor:
    """The cursor of the consumer ``name`` in ``store``; nothing is touched before `claim`.

    Its beats come from a thread of its own, so that a consumer may take hours for a step. Safe to use from
    several threads. Raises OptionError for a name that no file may have.
    """

    def __init__(self, store: Store, name: str) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(
                f"consumer: {name!r} must be up to 100 letters, digits, dots, underscores and hyphens"
            )
        self._store = store
        self._name = name
        self._file = f"{name}.cursor"
        self._guard = threading.Lock()
        self._content = _Content()
        self._version: Version | None = None
        self._lost: CheckpointConflictError | None = None
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> str:
        """Names the file in messages."""
        return self._store.path_of(self._file)

    # -- holding ---------------------------------------------------------------------------------------------

    def claim(self, stop: threading.Event) -> bool:
        """Become the holder, after one that is gone; False if ``stop`` was set before it was known to be.

        Raises CheckpointConflictError where another one is at work, and the errors of a damaged file.
        """
        version, there = self._read()
        if there.holder is not None and not _has_ended(there.holder):
            deadline = time.monotonic() + _LEASE_SECONDS
            while time.monotonic() < deadline:
                if stop.wait(_LOOK_SECONDS):
                    return False
                now = self._store.version(self._file)
                if now != version:
                    raise self._held(there.holder)
            logger.warning(
                "%s: its holder gave no sign for %g s, and is taken for gone", self.path, _LEASE_SECONDS
            )
        mine = replace(there, holder=_own_identity(), beat=there.beat + 1)
        self._store.make_root()
        try:
            self._version = self._store.publish(self._file, mine.encode(), durable=True, expected=version)
        except CheckpointConflictError as error:
            raise self._held(self._read()[1].holder) from error
        self._content = mine
        self._thread = threading.Thread(target=self._beat, name="dcp-watch-beat", daemon=True)
        self._thread.start()
        return True

    def release(self) -> None:
        """Let the next one come at once; idempotent. Never raises: who watched has ended its work."""
        if self._thread is None or self._released.is_set():
            return
        self._released.set()
        try:
            self._change(lambda content: replace(content, holder=None))
        except (CheckpointConflictError, StorageError, CheckpointFormatError) as error:
            logger.info("%s could not be released: %s", self.path, error)

    def _beat(self) -> None:
        while not self._released.wait(_LEASE_SECONDS / _BEATS_A_LEASE):
            try:
                self._change(lambda content: replace(content, beat=content.beat + 1))
            except CheckpointConflictError:
                return  # raised at the next acknowledgement, too
            except Exception as error:  # noqa: BLE001 - the next beat may succeed
                logger.warning("%s: %s", self.path, error)

    # -- what was acknowledged -------------------------------------------------------------------------------

    def acknowledged(self, step: int) -> Acknowledged | None:
        """Return which commit of ``step`` was acknowledged last."""
        with self._guard:
            return self._content.acknowledged.get(step)

    def acknowledge(self, step: int, commit: Acknowledged, present: Collection[int]) -> None:
        """Note that ``commit`` of ``step`` is done, durably; ``present`` are the committed steps.

        Raises CheckpointConflictError where another holder has taken this one for gone: then it is not.
        """

        def noted(content: _Content) -> _Content:
            steps = content.acknowledged | {step: commit}
            gone = sorted(one for one in steps if one not in present and one != step)
            for one in gone[: max(0, len(gone) - _GONE_STEPS)]:
                del steps[one]
            return replace(content, acknowledged=steps)

        self._change(noted)

    def _change(self, change: Callable[[_Content], _Content]) -> None:
        with self._guard:
            if self._lost is not None:
                raise self._lost
            new = change(self._content)
            for _ in range(_ATTEMPTS):
                try:
                    self._version = self._store.publish(
                        self._file, new.encode(), durable=True, expected=self._version
                    )
                except CheckpointConflictError:
                    self._look_again()
                    continue
                self._content = new
                return
        raise StorageError(f"{self.path} cannot be replaced", path=self.path, op="publish")

    def _look_again(self) -> None:
        """Look again after a conflict: it may be one's own publish, whose answer was lost, or another
        holder's."""
        version, there = self._read()
        mine = self._content.holder
        if mine is None or there.holder is None or there.holder.get("token") != mine["token"]:
            self._lost = self._held(there.holder)
            raise self._lost
        self._version = version

    def _read(self) -> tuple[Version | None, _Content]:
        version = self._store.version(self._file)
        if version is None:
            return None, _Content()
        try:
            return version, _Content.decode(self._store.read(self._file, limit_bytes=_LIMIT_BYTES))
        except CheckpointNotFoundError:
            return None, _Content()
        except CheckpointFormatError as error:
            raise type(error)(
                f"{self.path}: {error}; without this file the consumer {self._name!r} begins anew",
                **(error.facts | {"path": self.path}),
            ) from error

    def _held(self, holder: dict[str, Any] | None) -> CheckpointConflictError:
        who = "no process" if holder is None else f"process {holder.get('pid')} on {holder.get('host')}"
        return CheckpointConflictError(
            f"the consumer {self._name!r} is {who}: one at a time continues from {self.path}. Give each a "
            "name of its own, or end the other one",
            path=self.path,
        )


def _own_identity() -> dict[str, Any]:
    return {
        "token": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": start_ticks(os.getpid()),
    }


def _machine() -> str:
    """Return where process ids mean the same: this boot of this machine, and this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid.uuid4().hex  # like no other


def start_ticks(pid: int) -> int | None:
    """Return when a process was started, in ticks since the boot, so that another one with its id is
    recognised; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _has_ended(holder: dict[str, Any]) -> bool:
    """Return whether the holder was a process of this machine that is gone; of processes elsewhere only
    their beats tell."""
    pid = holder.get("pid")
    if holder.get("machine") != _machine() or type(pid) is not int:
        return False
    return start_ticks(pid) != holder.get("started")
