"""Jobs as JSON: state, progress, tasks, events."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from dcp.server.core.answers import Answer, RecordAnswer, answers, rfc3339
from dcp.server.core.jobs.ledger.rows import JobEventRow
from dcp.server.records import jobs as records

__all__ = [
    "JobAnswer",
    "JobErrorAnswer",
    "JobEventAnswer",
    "LogLineAnswer",
    "ProgressAnswer",
    "TaskAnswer",
    "ThroughputAnswer",
    "WaitingAnswer",
]


@answers(records.JobProgress)
class ProgressAnswer(RecordAnswer):
    """Of the tasks of a job; bytes count what is done of those that still run, too."""


@answers(records.JobFailure)
class JobErrorAnswer(RecordAnswer):
    """The failure of a job or task."""


@answers(records.JobWaiting)
class WaitingAnswer(RecordAnswer):
    """The failure of the last attempt, where another one follows; a job that has ended has an ``error``."""


@answers(records.Job)
class JobAnswer(RecordAnswer):
    """A job. ``is_ending``: it was cancelled or has failed, and is being stopped and cleared away."""


@answers(records.JobTask)
class TaskAnswer(RecordAnswer):
    """One task of a job, in the order of ``number``; what it has to do is the service's own business."""


@answers(records.JobThroughput)
class ThroughputAnswer(RecordAnswer):
    """The throughput of the tasks of a job."""


@answers(records.JobLogLine)
class LogLineAnswer(RecordAnswer):
    """An event of a job as a sentence."""


class JobEventAnswer(Answer):
    """Something happened to a job: the ``data`` of a server-sent event."""

    id: int
    job_id: int
    kind: str = Field(examples=["submitted", "state", "retry", "cancel_requested", "ending"])
    at: str
    data: dict[str, Any]

    @classmethod
    def of(cls, event: JobEventRow) -> Self:
        """A row of the ledger."""
        return cls(
            id=event.id,
            job_id=event.job_id,
            kind=event.kind,
            at=rfc3339(event.at_seconds),
            data=dict(event.data),
        )
