"""`dcp.watch`: the committed steps of a run as they come, each acknowledged once. Torch-free."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from dcp.calls.plain_errors import plain_errors
from dcp.steps.folders import StepFacts, StepFolders, whole_step
from dcp.storage.closable import Closable
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME, is_commit_object
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError, OptionError
from dcp.storage.stores import type_of_place
from dcp.storage.stores.base import Store, place_text
from dcp.storage.stores.opening import OpenWith, SmallFiles
from dcp.watching.cursor import Acknowledged, Cursor

__all__ = ["Watch", "WatchedStep", "watch"]

logger = logging.getLogger(__name__)

_FOLDER: Final = ".watch"
"""Below the root: whoever looks for runs and checkpoints passes over names with a dot."""

_RACY_SECONDS: Final = 2.0
"""A commit this young may be replaced by another without its size and time showing it."""


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


class Watch(Closable, Iterator[WatchedStep]):
    """The result of `watch`: an iterator, and a context manager that lets go of the consumer's name."""

    def __init__(
        self,
        folders: StepFolders,
        cursor: Cursor,
        *,
        place: Store,
        interval_seconds: float,
        since: int,
        once: bool,
    ) -> None:
        self._folders = folders
        self._place = place
        self._cursor = cursor
        self._interval_seconds = interval_seconds
        self._since = since
        self._once = once
        self._stop = threading.Event()
        self._claimed = self._warned = False
        self._stamps: dict[int, str] = {}
        self._queue: deque[int] = deque()
        self._delivered: WatchedStep | None = None
        self._finalizer = weakref.finalize(self, cursor.release)

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

    @property
    def has_found_run(self) -> bool:
        """Return whether the run's folder was there at a look so far."""
        return self._claimed

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
        """Return whether this process is the consumer; where no run is, nothing is made."""
        if not self._claimed and self._folders.root.exists():
            self._check_run()
            self._claimed = self._cursor.claim(self._stop)
        elif not self._claimed and not self._warned:
            self._warned = True
            logger.warning("%s is not there yet", self._folders.root.url)
        return self._claimed

    def _check_run(self) -> None:
        """Refuse a checkpoint in the place of a run, in which no step would ever be."""
        if self._place.version(MANIFEST_NAME) is None and self._place.version(METADATA_NAME) is None:
            return
        if not self._folders.committed():
            raise OptionError(
                f"{self._place.url} is a checkpoint, and no run: give the folder that its steps are in"
            )

    def _look(self) -> None:
        now_seconds, there = time.time(), self._folders.committed()
        self._stamps = {step: _stamp(files, now_seconds) for step, files in there.items()}
        self._queue.extend(step for step in there if step >= self._since and not self._is_done(step))

    def _is_done(self, step: int) -> bool:
        known = self._cursor.acknowledged(step)
        if known is None:
            return False
        if known.stamp and known.stamp == self._stamps[step]:
            return True
        facts = self._facts(step)
        return facts is None or facts.save_id == known.save_id

    def _step(self, step: int) -> WatchedStep | None:
        """Read a step; None if it has gone since it was listed."""
        facts = self._facts(step)
        if facts is None or not self._folders.has(step):
            return None
        commit = Acknowledged(facts.save_id, self._stamps.get(step, ""))
        return WatchedStep(
            step,
            self._folders.checkpoint_id(step),
            facts.save_id,
            facts.committed_seconds,
            facts.metrics,
            facts.partial,
            partial(self._acknowledge, step, commit),
        )

    def _acknowledge(self, step: int, commit: Acknowledged) -> None:
        if self._cursor.acknowledged(step) != commit:
            self._cursor.acknowledge(step, commit, self._stamps.keys())

    def _facts(self, step: int) -> StepFacts | None:
        try:
            return self._folders.facts(step)
        except CheckpointNotFoundError:
            return None
        except CheckpointError as error:
            if isinstance(error, OSError):
                raise
            logger.warning("%s is passed over: %s", self._folders.checkpoint_id(step), error)
            return None


def _stamp(files: SmallFiles, now_seconds: float) -> str:
    """Return how the commit objects are listed, where every other commit would be listed otherwise; else
    ""."""
    infos = sorted(
        (info for info in files.values() if is_commit_object(info.name)), key=lambda info: info.name
    )
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
    return Watch(
        folders,
        Cursor(place, consumer),
        place=opener(root),
        interval_seconds=interval_seconds,
        since=whole_step(since),
        once=once,
    )
