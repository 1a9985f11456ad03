"""The throughput of a job, and its events as sentences, for people who watch it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp.server.records.jobs import Job, JobEvent, JobLogLine, JobProgress, JobThroughput

__all__ = ["log_line", "throughput_of"]


def throughput_of(
    job: Job, progress: JobProgress | None, begun_seconds: float | None, now: float
) -> JobThroughput:
    """The throughput of a job whose tasks were begun then, if they were."""
    found = progress or JobProgress()
    until = now if job.finished_at is None else job.finished_at.timestamp()
    seconds = None if begun_seconds is None else max(0.0, until - begun_seconds)
    rate = found.done_bytes / seconds if seconds and found.done_bytes else None
    left = None if rate is None or job.is_final else (found.total_bytes - found.done_bytes) / rate
    return JobThroughput(job.id, job.state, found.done_bytes, found.total_bytes, seconds, rate, left)


def log_line(event: JobEvent) -> JobLogLine:
    """The event as a sentence."""
    text = _sentence(event.kind, event.data)
    return JobLogLine(event.id, event.at, event.kind, text, dict(event.data))


def _sentence(kind: str, data: Mapping[str, Any]) -> str:
    head = {
        "submitted": f"submitted by {data.get('created_by')}",
        "state": str(data.get("state")),
        "retry": f"again in {float(data.get('delay_seconds') or 0):.3g} s",
        "cancel_requested": f"cancellation requested by {data.get('actor')}",
        "ending": "is being stopped and cleared away",
        "discard_failed": "what it left cannot be cleared away yet",
    }.get(kind, kind)
    if data.get("retried_by"):
        head += f", by {data['retried_by']}"
    error = data.get("error")
    if isinstance(error, Mapping):
        task = "" if error.get("task") is None else f"task {error['task']}: "
        head += f": {task}{error.get('type')}: {error.get('detail')}"
    return head
