"""Background writers: carry out saves one after the other, behind the training loop; here in a thread."""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from dcp.features.plan_cache import remembering
from dcp.planners.save.plan_cache import PlanCache
from dcp.storage.errors import CheckpointError
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from dcp.background.future import SaveFuture
    from dcp.ranks.collectives import Ranks
    from dcp.saving.save import Save

__all__ = ["BackgroundWriter", "Payload", "RefusedWriter", "Staged", "ThreadWriter"]


class Payload(Protocol):
    """A rank's part of a save: `DefaultStager.stage_local` gives one."""

    @property
    def done(self) -> Future[Any]:
        """Gives the part when its copies are complete and checked; fails where staging failed."""

    @property
    def seconds(self) -> dict[str, float]:
        """Phases that are over once ``done`` is."""

    def release(self) -> None:
        """The save has ended, whatever the end: the copies may be overwritten; idempotent."""


@dataclass
class Staged:
    """A part that another stager than ours has copied, or could not copy."""

    done: Future[Any]
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def failed(cls, error: BaseException) -> Staged:
        """Stands for a state that could not be staged, so that the other ranks learn why."""
        done: Future[Any] = Future()
        done.set_exception(error)
        return cls(done)

    def release(self) -> None:
        """Drop the copy."""
        self.done = Future()


class RefusedWriter(FileSystemWriter):
    """Stands for what a rank cannot save with: its save takes part in the first step that the other ranks
    make, and fails there with ``error`` on all of them."""

    def __init__(self, error: Exception) -> None:
        super().__init__(os.curdir, open_store=partial(_fail, error))

    def discard(self) -> None:
        """Nothing was written."""


def _fail(error: Exception, path: str | os.PathLike[str]) -> NoReturn:
    raise error


class BackgroundWriter(ABC):
    """Carries out saves in the order in which they come, the same on all ranks."""

    @abstractmethod
    def submit(self, order: Save, payload: Payload, future: SaveFuture) -> None:
        """Begin a save; returns at once. Staging may still be running.

        ``future`` ends with the save, after ``payload`` was released. A payload that fails to be staged
        fails the save on all ranks.
        """

    @abstractmethod
    def close(self, timeout_seconds: float) -> None:
        """Finish the saves that were submitted, then stop; bounded, idempotent."""


class ThreadWriter(BackgroundWriter):
    """Carries out saves in a thread of the trainer.

    It runs as a daemon: a save that hangs must not keep the interpreter from ending once the session's
    bounded drain is over. ``ranks_for`` makes the ranks of a save, given its abort.
    """

    def __init__(self, ranks_for: Callable[[threading.Event], Ranks]) -> None:
        self._ranks_for = ranks_for
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._cache = PlanCache()
        self._closed = False

    def submit(self, order: Save, payload: Payload, future: SaveFuture) -> None:
        """Queue the save."""
        if self._closed:
            raise CheckpointError("this writer is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dcp-writer", daemon=True)
            self._thread.start()
        self._tasks.put(partial(self._carry_out, order, payload, future))

    def close(self, timeout_seconds: float) -> None:
        """Let the queue run empty, then end the thread."""
        self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():  # which drops the session after its last save
                self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds the copies of other stagers

    def _carry_out(self, order: Save, payload: Payload, future: SaveFuture) -> None:
        def part() -> Any:
            staged = payload.done.result(order.options.timeout_seconds)
            order.seconds.update(payload.seconds)
            return staged

        try:
            ranks = self._ranks_for(future.abort_event)
            metadata, future.outcome = remembering(order, self._cache).run(part, ranks)
        except BaseException as error:  # noqa: BLE001 - it is the future's, whatever it is
            payload.release()
            future.set_exception(error)
        else:
            payload.release()
            future.set_result(metadata)
