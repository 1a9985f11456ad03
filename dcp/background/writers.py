"""Background writers: run saves in order in a thread. `SaveFuture` is the result of a save."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp.calls.plain_errors import plain_errors, shorten
from dcp.features.plan_cache import PlanCache, remembering
from dcp.progress import is_within_callback
from dcp.saving.save import SaveOutcome as SaveOutcome
from dcp.storage.errors import CheckpointError, SaveAbortedError
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from dcp.ranks.collectives import Ranks
    from dcp.saving.save import Save
    from dcp.staging.stager import StagedState


class SaveFuture(Future[Metadata], AsyncSaveResponse):
    """A running asynchronous save.

    As a future, `result` waits for the commit and returns torch's `Metadata`, or raises the error of the save
    on all ranks. As torch's `AsyncSaveResponse`, ``staging_completion`` is done when the state may change
    (StagingError if the state changed during the copy), and ``upload_completion`` is the future itself.
    `cancel` cancels the save on all ranks.
    """

    # the base is a dataclass, which compares by value and is not hashable
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, checkpoint_id: str | os.PathLike[str]) -> None:
        Future.__init__(self)
        self.checkpoint_id = os.fspath(checkpoint_id)
        self.staging_completion: Future[None] = Future()
        self.outcome: SaveOutcome | None = None
        self.abort_event = threading.Event()
        self.on_abort: Callable[[], None] | None = None
        """Function called by `abort`, for a writer in another process."""

    @plain_errors
    def result(self, timeout: float | None = None) -> Metadata:
        """Wait for the commit and return torch's `Metadata`, or raise the error of the save."""
        return super().result(timeout)

    @property
    def upload_completion(self) -> Future[Metadata]:  # type: ignore[override]
        """This future."""
        return self

    def staging_ended(self, staged: Future[Any]) -> None:
        """End ``staging_completion`` as the staging has ended."""
        error = staged.exception()
        if error is None:
            self.staging_completion.set_result(None)
        else:
            shorten(error)  # the future adds two frames when it raises
            self.staging_completion.set_exception(error)

    @plain_errors
    def cancel(self) -> bool:
        """Cancel the save and wait for its end. Call it on any rank, from any thread, also repeatedly.

        Returns:
            True if the save left neither a checkpoint nor files; `result` then raises SaveAbortedError on all
            ranks. False if the save had committed or failed.

        Raises:
            CheckpointError: Called in a progress callback of the save; use `abort`.
        """
        if is_within_callback():
            raise CheckpointError(
                "cancel() in a progress callback would wait for itself; call abort() instead"
            )
        self.abort()
        self.exception()
        return self.cancelled()

    def cancelled(self) -> bool:
        """Return whether the save was cancelled by any rank before its commit."""
        return self.done() and isinstance(self.exception(), SaveAbortedError)

    def abort(self) -> None:
        """Cancel the save like `cancel`, without waiting for its end. `exception` waits."""
        self.abort_event.set()
        on_abort = self.on_abort  # the end of the save may clear the attribute
        if on_abort is not None:
            on_abort()


def own_client(store: Any) -> Any:
    """Return another connection to the store if its class supports it; otherwise the store."""
    try:
        return store.clone()
    except RuntimeError:  # also NotImplementedError, of a class with one connection only
        return store


def raise_error(error: Exception, *_: Any) -> NoReturn:
    """Raise ``error``, where a function is needed."""
    raise error


class RefusedWriter(FileSystemWriter):
    """Writer that fails its save with ``error`` on all ranks, in the first step."""

    def __init__(self, error: Exception) -> None:
        super().__init__(os.curdir, open_store=partial(raise_error, error))

    def discard(self) -> None:
        """Do nothing: nothing was written."""


class ThreadWriter:
    """Run saves in a daemon thread, in order.

    A hanging save must not block interpreter exit after the session's timeout. ``ranks_for`` makes the ranks
    of a save from its abort event.
    """

    def __init__(self, ranks_for: Callable[..., Ranks]) -> None:
        self._ranks_for = ranks_for
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._cache = PlanCache()
        self._closed = False
        self._changing = threading.RLock()

    def submit(self, order: Save, payload: StagedState, future: SaveFuture) -> None:
        """Queue a save and return. Staging may still be running.

        ``future`` ends after ``payload`` is released. A failed staging fails the save on all ranks.
        """
        with self._changing:  # no save may be queued after the close
            if self._closed:
                raise CheckpointError("the background writer is closed: open a new session")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dcp-writer", daemon=True)
                self._thread.start()
            self._tasks.put(partial(self._carry_out, order, payload, future))

    def close(self, timeout_seconds: float) -> None:
        """Finish queued saves and stop, within the timeout. Idempotent."""
        with self._changing:
            self._closed = True
            self._tasks.put(None)
        # called in the thread itself, which drops the session after its last save
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # releases copies of custom stagers

    def _carry_out(self, order: Save, payload: StagedState, future: SaveFuture) -> None:
        def part() -> Any:
            staged = payload.done.result(order.options.timeout_seconds)
            order.seconds.update(payload.seconds)
            return staged

        try:
            ranks = self._ranks_for(abort=future.abort_event)
            metadata, future.outcome = remembering(order, self._cache).run(part, ranks)
        except BaseException as error:  # noqa: BLE001 - it is the future's, whatever it is
            payload.release()
            future.set_exception(error)
        else:
            payload.release()
            future.set_result(metadata)
