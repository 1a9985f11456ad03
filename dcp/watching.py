"""`dcp.watch`: the committed steps of a run as they come, each acknowledged once for a consumer. Torch-free.

What a consumer has acknowledged is in one small file, its cursor, so that the next process continues after a
kill. The file has its holder, too, who writes it anew with another beat every few seconds. Each change
compares and replaces, so that one of two holders finds out at its next change that it has lost the file. A
holder lives as long as its beat changes; no clock of another machine is believed.
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
"""Below the root: whoever looks for runs and checkpoints passes over names with a dot."""


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A committed checkpoint of a run; ``checkpoint_id`` is its path or URL, ``save_id`` tells it from others
    of the same step. ``partial`` has the names of its entries if it is not the whole state, but what
    there was time for before a deadline."""

    step: int
    checkpoint_id: str
    save_id: str
    committed_seconds: float | None
    metrics: Mapping[str, float]
    partial: tuple[str, ...] = ()
    _acknowledge: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def acknowledge(self) -> None:
        """Mark the step as done, so that it is not given again; idempotent.

        Raises:
            CheckpointConflictError: Another process has become this consumer, and is given the step again.
            StorageError: The cursor cannot be written: the step is given again.
        """
        self._acknowledge()


@dataclass(eq=False)
class Watch(Closable, Iterator[WatchedStep]):
    """The result of `watch`: an iterator, and a context manager that lets go of the consumer's name."""

    _folders: StepFolders
    _cursor: Cursor
    _interval_seconds: float
    _since: int
    _once: bool

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._warned = self.has_found_run = False
        """The latter: the folder of the run was there at a look so far, and this process is the consumer."""
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
        """End the iteration, at once where it waits for another step; from any thread."""
        self._stop.set()

    def close(self) -> None:
        """End, and let another process be this consumer at once; idempotent. A step that was given and not
        acknowledged is given to that one."""
        self._stop.set()
        self._delivered = None
        self._finalizer()

    def is_committed(self, step: WatchedStep) -> bool:
        """Return whether this very checkpoint is still there: neither deleted nor saved anew."""
        facts = self._facts(step.step)
        return facts is not None and facts.save_id == step.save_id

    # -- steps that are there --------------------------------------------------------------------------------

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
            logger.warning("%s; the next look is in %g s", error, self._interval_seconds)
        return None

    def _is_claimed(self) -> bool:
        """Return whether this process is the consumer; where no run is, nothing is made.

        Raises OptionError for a checkpoint in the place of a run, in which no step would ever be.
        """
        if not self.has_found_run and self._folders.root.place.exists():
            self._folders.check_run()
            self.has_found_run = self._cursor.claim(self._stop)
        elif not self.has_found_run and not self._warned:
            self._warned = True
            logger.warning("%s is not there yet", self._folders.root.url)
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
        """Read a step; None if it has gone since it was listed."""
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
            logger.warning("%s is passed over: %s", self._folders.checkpoint_id(step), error)
            return None


def _stamp(files: SmallFiles, now_seconds: float) -> str:
    """Return how the commit objects are listed, where another commit would be listed otherwise; else ""."""
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
    """Give the committed steps of a run, those that are there and those to come: for evaluators and
    exporters::

        with dcp.watch("s3://bucket/run", consumer="eval") as steps:
            for step in steps:
                evaluate(step.checkpoint_id)

    Each commit is acknowledged once for a consumer of that name, durably, when the next one is asked for or
    by `WatchedStep.acknowledge`; until then whoever continues is given it again, also after a kill. A step
    that is saved anew is another commit. What retention deletes before its turn is not given. The lowest step
    that is there is the next. One process at a time is a consumer; others get an error, or continue from it
    once it has ended or given no sign of life for half a minute.

    Args:
        root: The folder of the run, or its URL. It need not be there yet.
        consumer: Whose steps these are; another name is given all of them, too.
        since: No steps below this one.
        once: End after those that are there.
        interval_seconds: The pause between two looks, which cost a listing each.
        cursor: The folder, or URL, for what was acknowledged; None is ``.watch`` in the run's own.
        name: As for `CheckpointManager`.
        storage_options: As for `dcp.save`.

    Returns:
        An iterator, which waits for the next step where there is none. An outage of the storage is logged,
        and waited for, too; not with ``once``.

    Raises:
        OptionError: An argument cannot be.

        The iterator raises CheckpointConflictError where another process is this consumer, or has become it,
        OptionError where ``root`` is a checkpoint and no run, CheckpointFormatError for a cursor that is
        none, and StorageError where it cannot be written.
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


_RACY_SECONDS: Final = 2.0
"""A commit this young may be replaced by another without its size and time showing it."""


_Content = dict[str, Any]
"""Fields of the file: who holds it, the beat of that one, and by step what was acknowledged: the id of the
save, and how the commit objects were listed, if those of no other commit would be ("" else)."""

_EMPTY: Final[_Content] = {
    "kind": _KIND,
    "version": _VERSION,
    "holder": None,
    "beat": 0,
    "acknowledged": {},
}


def _decoded(data: bytes) -> _Content:
    """Read the fields of a file. Raises CheckpointFormatError for what no `Cursor` writes,
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
        steps = {}
        for step, (save_id, *stamp) in fields["acknowledged"].items():
            steps[int(step)] = str(save_id), str(stamp[0]) if stamp else ""
        holder = None if fields["holder"] is None else dict(fields["holder"])
        return _EMPTY | {"holder": holder, "beat": int(fields["beat"]), "acknowledged": steps}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
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
        self._content = _EMPTY
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
        if there["holder"] is not None and not _has_ended(there["holder"]):
            deadline = time.monotonic() + _LEASE_SECONDS
            while time.monotonic() < deadline:
                if stop.wait(_LOOK_SECONDS):
                    return False
                if self._store.version(self._file) != version:
                    raise self._held(there["holder"])
            logger.warning(
                "%s: its holder gave no sign for %g s, and is taken for gone", self.path, _LEASE_SECONDS
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
        """Let the next one come at once; idempotent. Never raises: who watched has ended its work."""
        if self._thread is None or self._released.is_set():
            return
        self._released.set()
        try:
            self._change(lambda content: {"holder": None})
        except (CheckpointConflictError, StorageError, CheckpointFormatError) as error:
            logger.info("%s could not be released: %s", self.path, error)

    def _beat(self) -> None:
        while not self._released.wait(_LEASE_SECONDS / _BEATS_A_LEASE):
            try:
                self._change(lambda content: {"beat": content["beat"] + 1})
            except CheckpointConflictError:
                return  # raised at the next acknowledgement, too
            except Exception as error:  # noqa: BLE001 - the next beat may succeed
                logger.warning("%s: %s", self.path, error)

    # -- what was acknowledged -------------------------------------------------------------------------------

    @property
    def acknowledged(self) -> dict[int, tuple[str, str]]:
        """Says which commit of a step was acknowledged last."""
        found: dict[int, tuple[str, str]] = self._content["acknowledged"]
        return found

    def acknowledge(self, step: int, commit: tuple[str, str], present: Collection[int]) -> None:
        """Note that ``commit`` of ``step`` is done, durably; ``present`` are the committed steps.

        Raises CheckpointConflictError where another holder has taken this one for gone: then it is not.
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
        """Replace fields by those that ``change`` makes of what was published last: one request, unless the
        file was changed since."""
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
        """Look again after a conflict: it may be one's own publish, whose answer was lost, or another
        holder's."""
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
