"""Events of a manager: log records, `torch.monitor`, and the user's callbacks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import torch

from dcp.storage.errors import CheckpointError

logger = logging.getLogger(__name__)

EventKind = Literal[
    "saved",
    "save_failed",
    "save_retried",
    "save_skipped",
    "save_cancelled",
    "verified",
    "verify_failed",
    "deleted",
    "delete_failed",
    "dropped",
    "drop_failed",
    "restored",
    "skipped_damaged",
    "skipped_partial",
    "stop_requested",
]

_NOT_WITHIN_WORK = frozenset(
    {"save_skipped", "restored", "skipped_damaged", "skipped_partial", "stop_requested"}
)
"""Kinds of events emitted by the training thread outside of a save."""

_TROUBLE = frozenset({"save_retried", "save_cancelled", "skipped_damaged", "skipped_partial"})
"""Kinds logged as warnings, besides events with an error."""

_LOGGED = ("step", "rank", "seconds", "size_bytes", "error", "data")


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a step's checkpoint.

    Kinds on every rank: ``saved``, ``save_failed``, ``save_cancelled``, ``save_retried``, ``save_skipped``
    (the previous save was running), ``restored``, ``skipped_damaged``, ``skipped_partial`` and
    ``stop_requested``. Kinds on the coordinator: ``verified``, ``verify_failed``, ``deleted``,
    ``delete_failed``, ``dropped`` and ``drop_failed``.

    Attributes:
        seconds: Seconds by phase, of this rank.
        size_bytes: Bytes written by this rank.
        error: Text of the error. In ``saved``, an error after the commit, such as writing `.metadata`.
        data: Further facts, such as ``attempts`` of ``save_retried`` and ``parts`` of ``dropped``.
        time: Seconds since the epoch.
    """

    kind: EventKind
    step: int | None = None
    rank: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    size_bytes: int = 0
    error: str | None = None
    data: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    time: float = 0.0


EventCallback = Callable[[Event], None]
"""Function that receives each event, from any thread. Exceptions are logged and ignored.

A callback may list and pin steps. It must not save, restore, wait or close: the manager waits for the
callback.
"""


class Events:
    """Sends a manager's events to the log, to `torch.monitor` and to callbacks."""

    def __init__(self, root: str, rank: int, callbacks: Sequence[EventCallback] = ()) -> None:
        self.root = root
        self._rank = rank
        self._callbacks = (_tell_torch, *callbacks)
        self._telling = threading.local()

    def emit(
        self,
        kind: EventKind,
        step: int | None = None,
        *,
        seconds: Mapping[str, float] | None = None,
        size_bytes: int = 0,
        error: BaseException | str | None = None,
        level: int | None = None,
        **data: str | int | float | bool,
    ) -> None:
        """Send an event to all callbacks and the log. Never raises; ``level`` overrides the log level."""
        text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        event = Event(kind, step, self._rank, dict(seconds or {}), size_bytes, text, data, time.time())
        self._log(event, level)
        self._telling.work = kind if kind not in _NOT_WITHIN_WORK else None
        try:
            for tell in self._callbacks:
                try:
                    tell(event)
                except (Exception, SystemExit):  # SystemExit would end the thread of the save
                    logger.exception("a listener raised an error for the event %r of step %s", kind, step)
        finally:
            self._telling.work = None

    def refuse_to_wait(self, call: str) -> None:
        """Raise CheckpointError if a callback called ``call``, which would wait for the callback."""
        kind = getattr(self._telling, "work", None)
        if kind is not None:
            raise CheckpointError(
                f"{call} in a callback of the event {kind!r} would wait for itself; call it from the "
                f"training loop"
            )

    def _log(self, event: Event, level: int | None) -> None:
        """Write a log record with the event's fields in ``extra``."""
        if level is None:
            level = logging.WARNING if event.kind in _TROUBLE or event.error is not None else logging.INFO
        if not logger.isEnabledFor(level):
            return
        details = [f"{name} {spent:.3f} s" for name, spent in event.seconds.items()]
        details += [f"{name} {value}" for name, value in event.data.items()]
        details += [] if event.error is None else [event.error]
        where = self.root if event.step is None else f"{self.root} step {event.step}"
        text = event.kind.replace("_", " ") + (": " if details else "") + ", ".join(details)
        extra = {f"dcp_{name}": getattr(event, name) for name in _LOGGED}
        extra |= {"dcp_event": event.kind, "dcp_root": self.root}
        logger.log(level, "%s, rank %d: %s", where, event.rank, text, extra=extra)


def _tell_torch(event: Event) -> None:
    data: dict[str, str | int | float | bool] = {"rank": event.rank, "size_bytes": event.size_bytes}
    data |= {} if event.step is None else {"step": event.step}
    data |= {} if event.error is None else {"error": event.error}
    for name, spent in event.seconds.items():
        data[f"seconds.{name}"] = spent
    data |= event.data
    moment = datetime.fromtimestamp(event.time, UTC)
    torch.monitor.log_event(torch.monitor.Event(f"dcp.{event.kind}", moment, data))
