"""The result of an asynchronous save: one future that serves both usages of torch's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp.calls.plain_errors import plain_errors
from dcp.progress import is_within_callback
from dcp.saving.save import SaveOutcome
from dcp.storage.errors import CheckpointError, SaveAbortedError

__all__ = ["SaveFuture", "SaveOutcome"]


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
        self._on_abort: Callable[[], None] | None = None

    @plain_errors
    def result(self, timeout: float | None = None) -> Metadata:
        """torch's `Metadata` once the checkpoint is committed; raises what the save raised."""
        return super().result(timeout)

    @property
    def upload_completion(self) -> Future[Metadata]:  # type: ignore[override]
        """This future."""
        return self

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
        """As `cancel`, without waiting for the end, which `exception` tells."""
        self.abort_event.set()
        callback = self._on_abort
        if callback is not None:
            callback()

    def when_aborted(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called by `abort`: for a writer that does not see ``abort_event``.

        It is dropped when the save has ended: it holds the staged copy, and futures are kept for long.
        """
        self._on_abort = callback
        if self.abort_event.is_set():
            callback()
        self.add_done_callback(_drop_on_abort)


def _drop_on_abort(future: Future[Metadata]) -> None:
    if isinstance(future, SaveFuture):
        future._on_abort = None
