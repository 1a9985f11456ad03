"""Server-sent events: parse bytes into events of jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from dcp.server.client.errors import AnswerError

__all__ = ["EventStream", "JobEvent"]

_LONGEST_PAUSE_SECONDS: Final = 10.0
_MAX_EVENT_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a job. ``kind`` "progress" and "end" come without ``id``; "end" is the last of one job, and
    "ready" the first of all jobs."""

    kind: str
    data: Mapping[str, Any]
    id: int | None = None
    at: datetime | None = None
    job_id: int | None = None


@dataclass(slots=True)
class EventStream:
    """One stream over several connections. The next one continues after the event ``last_id``; the last event
    sets ``ended``."""

    last_id: int | None = None
    ended: bool = False
    pause_seconds: float = 0.5
    failures: int = 0
    _event: str = ""
    _id: str | None = None
    _data: list[str] = field(default_factory=list)
    _size: int = 0
    _rest: bytes = b""

    def headers(self) -> dict[str, str]:
        """Headers of the next connection, which begins with a new event."""
        self._forget()
        self._rest = b""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        return headers if self.last_id is None else headers | {"Last-Event-ID": str(self.last_id)}

    def feed(self, data: bytes) -> list[JobEvent]:
        """Parse the next bytes into the events that they complete. Raises AnswerError.

        Lines end at line feeds alone, unlike those of `str.splitlines`.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise AnswerError("an event of the service is too long")
        events = (self._line(line.removesuffix(b"\r").decode(errors="replace")) for line in lines)
        return [event for event in events if event is not None]

    def _line(self, line: str) -> JobEvent | None:
        if not line:
            return self._complete()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        self._size += len(line)
        if self._size > _MAX_EVENT_BYTES:
            raise AnswerError("an event of the service is too long")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id":
            self._id = value
        elif name == "retry" and value.isdecimal():
            self.pause_seconds = min(int(value) / 1000, _LONGEST_PAUSE_SECONDS)
        return None

    def failed(self) -> float:
        """Count a failed connection. Returns the seconds to wait before the next one."""
        self.failures += 1
        return min(_LONGEST_PAUSE_SECONDS, self.pause_seconds * 2.0 ** min(self.failures, 10))

    def _complete(self) -> JobEvent | None:
        kind, text, number = self._event or "message", "\n".join(self._data), self._id
        self._forget()
        if not text:
            return None
        try:
            document = json.loads(text)
        except ValueError as error:
            raise AnswerError("an event of the service is not JSON") from error
        self.failures = 0
        self.ended = self.ended or kind == "end"
        data = document if isinstance(document, Mapping) else {"value": document}
        job_id = data.get("job_id")
        job = job_id if type(job_id) is int else None
        if number is None or not number.isdecimal():
            return JobEvent(kind, data, job_id=job)
        self.last_id = int(number)
        inner, at = data.get("data"), data.get("at")
        return JobEvent(
            kind,
            inner if isinstance(inner, Mapping) else data,
            self.last_id,
            datetime.fromisoformat(at) if isinstance(at, str) else None,
            job,
        )

    def _forget(self) -> None:
        self._event, self._id, self._data, self._size = "", None, [], 0
