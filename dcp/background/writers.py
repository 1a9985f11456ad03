"""Background writers carry out saves one after the other, behind the training loop, here in a thread; the
result of a save is one future that serves both usages of torch's."""

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
    """An asynchronous save under way.

    As a future: `result` waits for the commit and gives torch's `Metadata`; it raises what the save raised,
    on all ranks alike. As torch's `AsyncSaveResponse`: ``staging_completion`` is done when the state may
    change again (it fails with StagingError if the state changed while it was copied), ``upload_completion``
    is this future itself.

    `cancel` calls the save off, on all ranks, and says whether it came in time.
    """

    # the base is a dataclass: it would compare futures by value and take their hash away
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, checkpoint_id: str | os.PathLike[str]) -> None:
        Future.__init__(self)
        self.checkpoint_id = os.fspath(checkpoint_id)
        self.staging_completion: Future[None] = Future()
        self.outcome: SaveOutcome | None = None
        self.abort_event = threading.Event()
        self.on_abort: Callable[[], None] | None = None
        """Called by `abort`: for a writer that does not see ``abort_event``."""

    @plain_errors
    def result(self, timeout: float | None = None) -> Metadata:
        """Return torch's `Metadata` once the checkpoint is committed; raises what the save raised."""
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
            shorten(error)  # two frames of the future's are added to it where it is raised
            self.staging_completion.set_exception(error)

    @plain_errors
    def cancel(self) -> bool:
        """Call the save off, and wait until it has ended; any rank may, from any thread, and again.

        Returns:
            True if nothing of it is committed or left behind: `result` raises SaveAbortedError, on all ranks.
            False if it had committed before that, or failed.

        Raises:
            CheckpointError: In a progress callback, which the save waits for: `abort` does not wait.
        """
        if is_within_callback():
            raise CheckpointError(
                "cancel() in a progress callback would wait for itself; abort() calls the save off as well"
            )
        self.abort()
        self.exception()
        return self.cancelled()

    def cancelled(self) -> bool:
        """Tell whether the save was called off, by whichever rank, before it committed."""
        return self.done() and isinstance(self.exception(), SaveAbortedError)

    def abort(self) -> None:
        """Call the save off as `cancel` does, without waiting for the end, for which `exception` waits."""
        self.abort_event.set()
        on_abort = self.on_abort  # the end of the save, which may come now, takes it away
        if on_abort is not None:
            on_abort()


def own_client(store: Any) -> Any:
    """Make another connection to the same store, where its kind has that; else the store."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError):
        return store


def raise_error(error: Exception, *_: Any) -> NoReturn:
    """Raise ``error``, in the place of a function that gives something."""
    raise error


class RefusedWriter(FileSystemWriter):
    """Stands for what a rank cannot save with: its save takes part in the first step that the other ranks
    make, and fails there with ``error`` on all of them."""

    def __init__(self, error: Exception) -> None:
        super().__init__(os.curdir, open_store=partial(raise_error, error))

    def discard(self) -> None:
        """Do nothing: nothing was written."""


class ThreadWriter:
    """Carries out saves in a thread of the trainer, in the order in which they come, the same on all ranks.

    It runs as a daemon: a save that hangs must not keep the interpreter from ending once the session's
    bounded drain is over. ``ranks_for`` makes the ranks of a save, given its abort.
    """

    def __init__(self, ranks_for: Callable[..., Ranks]) -> None:
        self._ranks_for = ranks_for
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._cache = PlanCache()
        self._closed = False
        self._changing = threading.RLock()

    def submit(self, order: Save, payload: StagedState, future: SaveFuture) -> None:
        """Begin a save; returns at once. Staging may still be running.

        ``future`` ends with the save, after ``payload`` was released. A payload that fails to be staged
        fails the save on all ranks.
        """
        with self._changing:  # no save may be queued behind the end
            if self._closed:
                raise CheckpointError("this writer is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dcp-writer", daemon=True)
                self._thread.start()
            self._tasks.put(partial(self._carry_out, order, payload, future))

    def close(self, timeout_seconds: float) -> None:
        """Finish the saves that were submitted, then stop; bounded, idempotent."""
        with self._changing:
            self._closed = True
            self._tasks.put(None)
        # the thread itself drops the session after its last save
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds the copies of other stagers

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
