"""Deleting checkpoints in the background: a queue, one thread, and patience with storage that fails.

How one checkpoint is removed is in `dcp.manager.cleanup.removal`. Torch-free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from dcp.manager.cleanup.removal import (
    Removed,
    finish_removal,
    is_abandoned,
    remove_abandoned,
    remove_checkpoint,
)
from dcp.steps.folders import StepFolders
from dcp.storage.commit_names import NOTES_NAME, is_commit_object
from dcp.storage.errors import CheckpointError, StorageError

__all__ = ["Deleter", "DeleterClosedError", "DeletionEvent"]

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 5
_PAUSE_SECONDS: Final = 1.0
"""Before the second attempt; it doubles from one to the next."""
_WAIT_SECONDS: Final = 60.0
"""Of a save, for the deletion of its step."""
_ABANDONED_AFTER_SECONDS: Final = 86_400.0
"""Age from which on data that no save committed is taken for abandoned."""

What = Literal["checkpoint", "rest", "abandoned"]


@dataclass(frozen=True, slots=True)
class DeletionEvent:
    """The end of the deletion of a step.

    - "deleted": ``files`` and ``size_bytes`` are gone.
    - "failed": the last attempt raised ``error``; the next start of a manager here goes on with it.

    ``what`` was deleted: a "checkpoint", the "rest" of one whose deletion was interrupted, or data files that
    a save had "abandoned".
    """

    kind: Literal["deleted", "failed"]
    step: int
    what: What
    seconds: float
    files: int = 0
    size_bytes: int = 0
    error: Exception | None = None


class DeleterClosedError(RuntimeError):
    """Something was to be deleted after `Deleter.close`; the next start of a manager here sees to it."""


@dataclass(slots=True)
class _Deletion:
    step: int
    what: What
    attempt: int = 0
    due_seconds: float = 0.0
    is_running: bool = False


class Deleter:
    """Deletes checkpoints of ``folders``, one after another, in a daemon thread while there are any.

    For one process of a run, the coordinator. A deletion that fails is repeated a few times, after a
    pause that doubles each time. ``on_event`` is called from the thread, and must not wait for it.
    """

    def __init__(
        self, folders: StepFolders, *, on_event: Callable[[DeletionEvent], None] | None = None
    ) -> None:
        self._folders = folders
        self._on_event = on_event
        self._jobs: dict[int, _Deletion] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._give_up = False

    # -- what is to be deleted -------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Queue the checkpoint of ``step``; returns at once. It is kept if it is pinned."""
        self._enqueue(_Deletion(step, "checkpoint"))

    def finish(self, step: int) -> None:
        """Queue the rest of a deletion that an earlier process began; returns at once."""
        self._enqueue(_Deletion(step, "rest"))

    def abandoned(self) -> list[int]:
        """Queue the step folders whose saves have never committed; returns them.

        Only those whose newest data file, or empty folder, is older than a day: a background
        writer may outlive its trainer, and commit yet.
        """
        now = time.time()
        steps = [
            step
            for step, files in self._folders.folders().items()
            if not any(map(is_commit_object, files))
            and is_abandoned(store := self._folders.store(step), store.list(), _ABANDONED_AFTER_SECONDS, now)
        ]
        for step in steps:
            self._enqueue(_Deletion(step, "abandoned"))
        return steps

    def _enqueue(self, job: _Deletion) -> None:
        with self._changed:
            if self._closing:
                raise DeleterClosedError("the deleter is closed")
            if job.step in self._jobs:
                return
            self._jobs[job.step] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="dcp-delete", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # -- a save that wants the place -------------------------------------------------------------------------

    def make_way(self, step: int) -> None:
        """Let a save to ``step`` begin: its deletion is over, and what is left of it is done right here.

        A checkpoint that is still whole stays: the save's commit replaces it, so that it is never missing.
        Raises what the storage raises, and `StorageError` if the thread is still at it after a
        minute.
        """
        self._take(step)
        files = self._folders.root.look_into(self._folders.name(step), (NOTES_NAME,))
        if NOTES_NAME in files and not any(map(is_commit_object, files)):
            self._remove(_Deletion(step, "rest"))

    def _take(self, step: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_running(step), _WAIT_SECONDS):
                raise StorageError(
                    f"{self._folders.checkpoint_id(step)} is being deleted, still after {_WAIT_SECONDS:g} "
                    "seconds: the storage hangs; save under another step, or when it works again",
                    path=self._folders.checkpoint_id(step),
                    op="delete",
                )
            self._jobs.pop(step, None)
            self._changed.notify_all()

    def _is_running(self, step: int) -> bool:
        job = self._jobs.get(step)
        return job is not None and job.is_running

    # -- the end ---------------------------------------------------------------------------------------------

    def pending(self) -> list[int]:
        """Steps that are queued or being deleted."""
        with self._changed:
            return sorted(self._jobs)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Until all is deleted or given up; False if it is not after ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_seconds)

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """Finish what is queued, each at most once more, and end the thread; idempotent.

        False if it took longer than ``timeout_seconds``: the rest is left to the next start. Whatever is cut
        off leaves checkpoints that are whole or gone.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        done = self.wait(timeout_seconds)
        with self._changed:
            self._give_up = True
            self._changed.notify_all()
        if done:  # then it is about to end
            thread.join(max(1.0, timeout_seconds))
        return done

    # -- the thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            began = time.monotonic()
            removed, error = Removed("absent"), None
            try:
                removed = self._remove(job)
            except Exception as failure:  # noqa: BLE001 - told below; one folder must not stop the others
                error = failure
            again = self._is_worth_another(job, error)
            self._tell(job, removed, error, again, time.monotonic() - began)
            self._end(job, again)

    def _next_job(self) -> _Deletion | None:
        """Wait for what is due; None if nothing is left, and the thread with it."""
        with self._changed:
            while self._jobs and not self._give_up:
                job = min(self._jobs.values(), key=lambda job: job.due_seconds)
                left_seconds = job.due_seconds - time.monotonic()
                if left_seconds <= 0 or self._closing:
                    job.is_running = True
                    job.attempt += 1
                    return job
                self._changed.wait(left_seconds)
            self._thread = None
            return None

    def _remove(self, job: _Deletion) -> Removed:
        store = self._folders.store(job.step)
        try:
            if job.what == "abandoned":
                return remove_abandoned(store, _ABANDONED_AFTER_SECONDS, time.time())
            remove = remove_checkpoint if job.what == "checkpoint" else finish_removal
            return remove(store, time.time())
        finally:
            self._folders.forget(job.step)

    def _is_worth_another(self, job: _Deletion, error: Exception | None) -> bool:
        # Anything but a failure of the storage would fail the same way again.
        return isinstance(error, CheckpointError | OSError) and job.attempt < _ATTEMPTS and not self._closing

    def _end(self, job: _Deletion, again: bool) -> None:
        with self._changed:
            job.is_running = False
            if again:
                job.due_seconds = time.monotonic() + _PAUSE_SECONDS * 2 ** (job.attempt - 1)
            else:
                self._jobs.pop(job.step, None)
            self._changed.notify_all()

    def _tell(
        self, job: _Deletion, removed: Removed, error: Exception | None, again: bool, seconds: float
    ) -> None:
        url, event = self._folders.checkpoint_id(job.step), None
        if error is not None:
            outlook = "it will be tried again" if again else "the next start of a manager here tries again"
            logger.warning("%s could not be deleted: %s; %s", url, error, outlook)
            if not again:
                event = DeletionEvent("failed", job.step, job.what, seconds, error=error)
        elif removed.outcome in ("pinned", "replaced"):
            logger.info("%s is not deleted: it is %s", url, removed.outcome)
        elif removed.outcome == "deleted" or job.attempt > 1:
            logger.info("%s is deleted: %d files", url, removed.files)
            event = DeletionEvent("deleted", job.step, job.what, seconds, removed.files, removed.size_bytes)
        if event is None or self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("a callback failed on %s", event)
