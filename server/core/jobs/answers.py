"""Jobs: what is to be done, how far it is, and what has happened."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from dcp.server.core.answers import Answer, rfc3339
from dcp.server.core.jobs.ledger.states import JobEventRow
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records import jobs as records

__all__ = [
    "JobAnswer",
    "JobErrorAnswer",
    "JobEventAnswer",
    "JobList",
    "LogLineAnswer",
    "LogPage",
    "ProgressAnswer",
    "TaskAnswer",
    "TaskList",
    "ThroughputAnswer",
    "WaitingAnswer",
]


@answers(records.JobProgress)
class ProgressAnswer(RecordAnswer):
    """Of the tasks of a job; bytes count what is done of those that still run, too."""


@answers(records.JobFailure)
class JobErrorAnswer(RecordAnswer):
    """Why it failed."""


@answers(records.JobWaiting)
class WaitingAnswer(RecordAnswer):
    """Why the last attempt failed, where another one follows; a job that has ended has an ``error``."""


@answers(records.Job)
class JobAnswer(RecordAnswer):
    """A job. ``is_ending``: it was cancelled or has failed, and is being stopped and cleared away."""


class JobList(Answer):
    """A page, newest first."""

    items: list[JobAnswer]
    next_cursor: str | None


@answers(records.JobTask)
class TaskAnswer(RecordAnswer):
    """One task of a job, in the order of ``number``; what it has to do is the service's own business."""


class TaskList(Answer):
    """A page, by number."""

    items: list[TaskAnswer]
    next_cursor: str | None


@answers(records.JobThroughput)
class ThroughputAnswer(RecordAnswer):
    """How fast the tasks of a job are."""


@answers(records.JobLogLine)
class LogLineAnswer(RecordAnswer):
    """An event of a job as a sentence."""


class LogPage(Answer):
    """The last lines, in their order; the next page has those before."""

    items: list[LogLineAnswer]
    next_cursor: str | None


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
