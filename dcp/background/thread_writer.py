"""The thread writer: saves run in one background thread of the trainer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dcp.background.future import SaveFuture
from dcp.background.worker import BackgroundWriter, Payload, payload_of
from dcp.planners.save.plan_cache import PlanCache
from dcp.ranks.collectives import Ranks
from dcp.saving.engine import SaveOrder
from dcp.saving.order import carry_out
from dcp.storage.errors import CheckpointError

__all__ = ["ThreadWriter"]


@dataclass
class _QueuedSave:
    order: SaveOrder
    payload: Payload
    future: SaveFuture


class ThreadWriter(BackgroundWriter):
    """Carries out saves in a thread, one at a time.

    It runs as a daemon: a save that hangs must not keep the interpreter from ending once the session's
    bounded drain is over. ``ranks_for`` makes the ranks of a save, given its abort.
    """

    def __init__(self, ranks_for: Callable[[threading.Event], Ranks]) -> None:
        self._ranks_for = ranks_for
        self._tasks: queue.SimpleQueue[_QueuedSave | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._cache = PlanCache()
        self._closed = False

    def submit(
        self,
        order: SaveOrder,
        payload: Payload,
        future: SaveFuture,
    ) -> None:
        """Queue the save."""
        if self._closed:
            raise CheckpointError("this writer is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dcp-writer", daemon=True)
            self._thread.start()
        self._tasks.put(_QueuedSave(order, payload, future))

    def close(self, timeout_seconds: float) -> None:
        """Let the queue run empty, then end the thread."""
        self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():  # which drops the session after its last save
                self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._carry_out(task)
            del task  # it holds the staged copies of foreign stagers

    def _carry_out(self, task: _QueuedSave) -> None:
        order, future = task.order, task.future
        try:
            metadata, outcome = carry_out(
                order,
                lambda: payload_of(task.payload, order),
                self._ranks_for(future.abort_event),
                cache=self._cache,
            )
        except BaseException as error:  # noqa: BLE001 - it is the future's, whatever it is
            task.payload.release()
            future.set_exception(error)
        else:
            task.payload.release()
            future.outcome = outcome
            future.set_result(metadata)
