"""`dcp.watch`: iterate over the committed steps of a run, once for each consumer. Does not import torch.

A consumer's cursor is a small file with the acknowledged steps, so the next process continues after a kill.
The holder of the cursor updates a counter (the beat) in the file every few seconds, by compare-and-swap. A
second holder is detected at the next change. A holder counts as alive while its beat changes; clocks of other
machines are not compared.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dcp.calls.plain_errors import plain_errors
from dcp.steps import StepFolders, StepState, whole_step
from dcp.storage.commit_names import is_commit_object
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    OptionError,
    StorageError,
    UnsupportedFormatError,
)
from dcp.storage.stores import type_of_place
from dcp.storage.stores.base import Closable, Store, Version, place_text
from dcp.storage.stores.opening import OpenWith, SmallFiles

logger = logging.getLogger(__name__)

_FOLDER: Final = ".watch"
"""Folder below the root; searches for runs and checkpoints skip names with a dot."""


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """Committed checkpoint of a run.

    Attributes:
        checkpoint_id: Path or URL for `dcp.load`.
        save_id: Id of the save, which distinguishes repeated saves of a step.
        partial: Names of the entries of a partial checkpoint, committed before a deadline; empty for a whole
            one.
    """

    step: int
    checkpoint_id: str
    save_id: str
    committed_seconds: float | None
    metrics: Mapping[str, float]
    partial: tuple[str, ...] = ()
    _acknowledge: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def acknowledge(self) -> None:
        """Mark the step as done. Idempotent.

        Raises:
            CheckpointConflictError: Another process has become this consumer and gets the step again.
            StorageError: The cursor cannot be written, so the step will be given again.
        """
        self._acknowledge()


@dataclass(eq=False)
class Watch(Closable, Iterator[WatchedStep]):
    """Iterator over steps, and context manager that releases the consumer's name. Made by `watch`."""

    _folders: StepFolders
    _cursor: Cursor
    _interval_seconds: float
    _since: int
    _once: bool

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._warned = self.has_found_run = False
        """``has_found_run`` is True once the run exists and this process is the consumer."""
        self._stamps: dict[int, str] = {}
        self._queue: deque[int] = deque()
        self._delivered: WatchedStep | None = None
        self._finalizer = weakref.finalize(self, self._cursor.release)

    @plain_errors
    def __next__(self) -> WatchedStep:
        if self._delivered is not None:
            self._delivered.acknowledge()
            self._delivered = None
        while not self._stop.is_set():
            self._delivered = self._found()
            if self._delivered is not None:
                return self._delivered
            if self._once or self._stop.wait(self._interval_seconds):
                break
        self.close()
        raise StopIteration

    def stop(self) -> None:
        """End the iteration, also during a wait. Thread-safe."""
        self._stop.set()

    def close(self) -> None:
        """Stop and release the consumer for other processes. Idempotent. An unacknowledged step is given
        again.
        """
        self._stop.set()
        self._delivered = None
        self._finalizer()

    def is_committed(self, step: WatchedStep) -> bool:
        """Return whether this checkpoint still exists, neither deleted nor saved again."""
        facts = self._facts(step.step)
        return facts is not None and facts.save_id == step.save_id

    # -- steps -----------------------------------------------------------------------------------------------

    def _found(self) -> WatchedStep | None:
        try:
            if not self._is_claimed():
                return None
            if not self._queue:
                self._look()
            while self._queue:
                if (found := self._step(self._queue.popleft())) is not None:
                    return found
        except CheckpointError as error:
            if self._once or not isinstance(error, OSError):
                raise
            logger.warning("%s; retrying in %g s", error, self._interval_seconds)
        return None

    def _is_claimed(self) -> bool:
        """Return whether this process is the consumer. Creates nothing where no run exists.

        Raises OptionError if the root is a checkpoint instead of a run.
        """
        if not self.has_found_run and self._folders.root.place.exists():
            self._folders.check_run()
            self.has_found_run = self._cursor.claim(self._stop)
        elif not self.has_found_run and not self._warned:
            self._warned = True
            logger.warning("%s does not exist yet; waiting for it", self._folders.root.url)
        return self.has_found_run

    def _look(self) -> None:
        now_seconds, there = time.time(), self._folders.committed()
        self._stamps = {step: _stamp(files, now_seconds) for step, files in there.items()}
        new = (step for step in there if step >= self._since and not self._is_done(step, there[step]))
        self._queue.extend(new)

    def _is_done(self, step: int, files: SmallFiles) -> bool:
        known = self._cursor.acknowledged.get(step)
        if known is None:
            return False
        save_id, stamp = known
        if stamp and stamp == self._stamps[step]:
            return True
        facts = self._facts(step, files)
        return facts is None or facts.save_id == save_id

    def _step(self, step: int) -> WatchedStep | None:
        """Read a step; None if it was deleted after the listing."""
        facts = self._facts(step)
        if facts is None or not self._folders.has(step):
            return None
        commit = facts.save_id, self._stamps.get(step, "")
        return WatchedStep(
            step,
            self._folders.checkpoint_id(step),
            facts.save_id,
            facts.committed_seconds,
            facts.metrics,
            facts.partial,
            lambda: self._cursor.acknowledge(step, commit, self._stamps.keys()),
        )

    def _facts(self, step: int, files: SmallFiles | None = None) -> StepState | None:
        try:
            return self._folders.facts(step, files)
        except CheckpointNotFoundError:
            return None
        except CheckpointError as error:
            if isinstance(error, OSError):
                raise
            logger.warning("%s is skipped: %s", self._folders.checkpoint_id(step), error)
            return None


def _stamp(files: SmallFiles, now_seconds: float) -> str:
    """Return the listing of the commit objects as text if another commit would differ; otherwise ""."""
    infos = [info for name, info in sorted(files.items()) if is_commit_object(name)]
    if any(now_seconds - info.modified_seconds < _RACY_SECONDS for info in infos):
        return ""
    return " ".join(f"{info.name} {info.size_bytes} {info.modified_seconds!r}" for info in infos)


@plain_errors
def watch(
    root: str | os.PathLike[str],
    *,
    consumer: str = "default",
    since: int = 0,
    once: bool = False,
    interval_seconds: float = 10.0,
    cursor: str | os.PathLike[str] | None = None,
    name: Callable[[int], str] | str = "step-{step:08d}",
    storage_options: Mapping[str, Any] | None = None,
) -> Watch:
    """Iterate over the existing and future committed steps of a run, for evaluators and exporters.

    Each commit is given once to a consumer of a name, lowest step first. It is acknowledged durably when the
    next step is requested, or by `WatchedStep.acknowledge`. Unacknowledged steps are given again to the next
    process. A step that is saved again is a new commit. Steps deleted by retention are skipped. One process
    at a time is a consumer; another process can continue after the first one has ended or has been silent for
    half a minute.

    Args:
        root: Folder or URL of the run, which need not exist yet.
        consumer: Name of the consumer. Each name gets all steps.
        since: Lowest step to give.
        once: True ends after the existing steps.
        interval_seconds: Pause between listings.
        cursor: Folder or URL of the cursor; ``.watch`` in the run if None.
        name: Format of folder names, as for `CheckpointManager`.
        storage_options: As for `dcp.save`.

    Returns:
        An iterator of `WatchedStep`. Without ``once`` it waits for new steps, and waits for an unavailable
        storage.

    Raises:
        OptionError: An argument is invalid.

    The iterator raises CheckpointConflictError if another process is the consumer, OptionError if
    ``root`` is a checkpoint, CheckpointFormatError for an invalid cursor, and StorageError if the cursor
    cannot be written.

    Examples:
        ```python
        with dcp.watch("s3://bucket/run", consumer="eval") as steps:
            for step in steps:
                evaluate(step.checkpoint_id)
        ```
    """
    if not (isinstance(interval_seconds, int | float) and 0 < interval_seconds < math.inf):
        raise OptionError(f"interval_seconds must be more than 0, not {interval_seconds!r}")
    opener = OpenWith(storage_options)
    folders = StepFolders(root, name, open_store=opener)
    if cursor is None:
        place = folders.root.store(_FOLDER)
    else:
        place = OpenWith(storage_options if type_of_place(place_text(cursor)).takes_options else None)(cursor)
    reader = Cursor(place, consumer)
    return Watch(folders, reader, interval_seconds, whole_step(since), once)


_LEASE_SECONDS: Final = 30.0
"""Time without a new beat after which a holder counts as dead."""

_BEATS_A_LEASE: Final = 3
_LOOK_SECONDS: Final = 0.5
_KIND: Final = "dcphub.cursor"
_VERSION: Final = 1
_LIMIT_BYTES: Final = 64 << 20
_ATTEMPTS: Final = 8
_GONE_STEPS: Final = 1000
"""Number of acknowledged, deleted steps to remember, because a listing may be old."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


_RACY_SECONDS: Final = 2.0
"""Age below which a commit may be replaced without a new size and time."""


_Content = dict[str, Any]
"""Fields of the cursor: its holder, the beat, and for each acknowledged step the save id and the stamp of the
listing.
"""

_EMPTY: Final[_Content] = {
    "kind": _KIND,
    "version": _VERSION,
    "holder": None,
    "beat": 0,
    "acknowledged": {},
}


def _decoded(data: bytes) -> _Content:
    """Decode a cursor. Raises CheckpointFormatError for invalid bytes, UnsupportedFormatError for a newer
    version.
    """
    try:
        fields = json.loads(data)
        is_ours = fields["kind"] == _KIND
        version = int(fields["version"])
    except (ValueError, TypeError, KeyError, RecursionError):
        is_ours, version = False, 0
    if not is_ours:
        raise CheckpointFormatError("not a cursor file of dcp.watch")
    if version > _VERSION:
        raise UnsupportedFormatError(f"a newer dcphub wrote this cursor ({version})", version=version)
    try:
        steps = {}
        for step, (save_id, *stamp) in fields["acknowledged"].items():
            steps[int(step)] = str(save_id), str(stamp[0]) if stamp else ""
        holder = None if fields["holder"] is None else dict(fields["holder"])
        return _EMPTY | {"holder": holder, "beat": int(fields["beat"]), "acknowledged": steps}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointFormatError(f"the cursor is damaged: {error}") from error


class Cursor:
    """Cursor of the consumer ``name`` in ``store``, untouched before `claim`. Thread-safe.

    A thread writes the beat, so a consumer may take hours for a step. Raises OptionError for an invalid name.
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
        self._content = _EMPTY
        self._version: Version | None = None
        self._lost: CheckpointConflictError | None = None
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> str:
        """Path of the cursor, for messages."""
        return self._store.path_of(self._file)

    # -- holding ---------------------------------------------------------------------------------------------

    def claim(self, stop: threading.Event) -> bool:
        """Become the holder after the previous one is dead; return False if ``stop`` was set before.

        Raises CheckpointConflictError if another holder is alive, and errors of a damaged file.
        """
        version, there = self._read()
        if there["holder"] is not None and not _has_ended(there["holder"]):
            deadline = time.monotonic() + _LEASE_SECONDS
            while time.monotonic() < deadline:
                if stop.wait(_LOOK_SECONDS):
                    return False
                if self._store.version(self._file) != version:
                    raise self._held(there["holder"])
            logger.warning(
                "%s: the process that holds this cursor has not renewed it for %g s and counts as dead",
                self.path,
                _LEASE_SECONDS,
            )
        holder: dict[str, Any] = {
            "token": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": start_ticks(os.getpid()),
        }
        self._store.make_root()
        try:
            self._publish(there | {"holder": holder, "beat": there["beat"] + 1}, version)
        except CheckpointConflictError as error:
            raise self._held(self._read()[1]["holder"]) from error
        self._thread = threading.Thread(target=self._beat, name="dcp-watch-beat", daemon=True)
        self._thread.start()
        return True

    def release(self) -> None:
        """Release the cursor. Idempotent; never raises."""
        if self._thread is None or self._released.is_set():
            return
        self._released.set()
        try:
            self._change(lambda content: {"holder": None})
        except (CheckpointConflictError, StorageError, CheckpointFormatError) as error:
            logger.info("the lock of the cursor %s could not be released: %s", self.path, error)

    def _beat(self) -> None:
        while not self._released.wait(_LEASE_SECONDS / _BEATS_A_LEASE):
            try:
                self._change(lambda content: {"beat": content["beat"] + 1})
            except CheckpointConflictError:
                return  # raised again at the next acknowledgement
            except Exception as error:  # noqa: BLE001 - the next beat may succeed
                logger.warning("%s: %s", self.path, error)

    # -- cursors ---------------------------------------------------------------------------------------------

    @property
    def acknowledged(self) -> dict[int, tuple[str, str]]:
        """Commit of each step that was acknowledged last."""
        found: dict[int, tuple[str, str]] = self._content["acknowledged"]
        return found

    def acknowledge(self, step: int, commit: tuple[str, str], present: Collection[int]) -> None:
        """Record durably that ``commit`` of ``step`` is done; ``present`` are the committed steps.

        Raises CheckpointConflictError, without recording, if another holder has replaced this one.
        """
        if self.acknowledged.get(step) == commit:
            return

        def noted(content: _Content) -> _Content:
            steps = content["acknowledged"] | {step: commit}
            gone = sorted(one for one in steps if one not in present and one != step)
            for one in gone[: max(0, len(gone) - _GONE_STEPS)]:
                del steps[one]
            return {"acknowledged": steps}

        self._change(noted)

    def _change(self, change: Callable[[_Content], _Content]) -> None:
        """Replace the last published fields by ``change`` of them, usually in one request."""
        with self._guard:
            if self._lost is not None:
                raise self._lost
            new = self._content | change(self._content)
            for _ in range(_ATTEMPTS):
                try:
                    self._publish(new, self._version)
                except CheckpointConflictError:
                    self._look_again()
                    continue
                return
        raise StorageError(f"{self.path} cannot be replaced", path=self.path, op="publish")

    def _look_again(self) -> None:
        """Read the cursor after a conflict, which may come from a publish of this process."""
        version, there = self._read()
        mine = self._content["holder"]
        if mine is None or there["holder"] is None or there["holder"].get("token") != mine["token"]:
            self._lost = self._held(there["holder"])
            raise self._lost
        self._version = version

    def _publish(self, content: _Content, expected: Version | None) -> None:
        data = json.dumps(content).encode()
        self._version = self._store.publish(self._file, data, durable=True, expected=expected)
        self._content = content

    def _read(self) -> tuple[Version | None, _Content]:
        version = self._store.version(self._file)
        if version is None:
            return None, _EMPTY
        try:
            return version, _decoded(self._store.read(self._file, limit_bytes=_LIMIT_BYTES))
        except CheckpointNotFoundError:
            return None, _EMPTY
        except CheckpointFormatError as error:
            raise type(error)(
                f"{self.path}: {error}; delete the file to restart the consumer {self._name!r} at the first "
                "step",
                **(error.facts | {"path": self.path}),
            ) from error

    def _held(self, holder: dict[str, Any] | None) -> CheckpointConflictError:
        who = "no process" if holder is None else f"process {holder.get('pid')} on {holder.get('host')}"
        return CheckpointConflictError(
            f"the consumer {self._name!r} is {who}: only one process can use {self.path}. Give each "
            f"consumer a unique name, or stop the other process",
            path=self.path,
        )


def _machine() -> str:
    """Identify the machine, its boot and the container, within which process ids are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid.uuid4().hex  # unique, so that no other machine matches


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in ticks since boot, to recognise a reused id; None if the process has
    ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _has_ended(holder: dict[str, Any]) -> bool:
    """Return whether the holder was a process of this machine that has ended."""
    pid = holder.get("pid")
    if holder.get("machine") != _machine() or type(pid) is not int:
        return False
    return start_ticks(pid) != holder.get("started")
