"""Jobs: what is to be done, how far it is, and what has happened."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from dcp.server.core.answers import Answer, rfc3339
from dcp.server.core.jobs.ledger import JobEventRow
from dcp.server.core.record_answers import RecordAnswer, answers
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
    """Why it failed."""


@answers(records.JobWaiting)
class WaitingAnswer(RecordAnswer):
    """Why the last attempt failed, where another one follows; a job that has ended has an ``error``."""

    @classmethod
    def of(cls, found: Any, **others: Any) -> Self:
        """What the ledger keeps."""
        return super().of(found, next_attempt_at=found["next_seconds"], **others)


@answers(records.Job)
class JobAnswer(RecordAnswer):
    """A job. ``is_ending``: it was cancelled or has failed, and is being stopped and cleared away."""

    @classmethod
    def of(cls, found: Any, **others: Any) -> Self:
        """A row of the ledger; ``progress`` is given of a job which has not ended."""
        times = {"not_before": found.not_before_seconds or None, "cancel_requested_at": found.cancel_seconds}
        return super().of(found, **times, **others)


@answers(records.JobTask)
class TaskAnswer(RecordAnswer):
    """One task of a job, in the order of ``number``; what it has to do is the service's own business."""

    @classmethod
    def of(cls, found: Any, **others: Any) -> Self:
        """A row of the ledger."""
        return super().of(found, not_before=found.not_before_seconds or None, **others)


@answers(records.JobThroughput)
class ThroughputAnswer(RecordAnswer):
    """How fast the tasks of a job are."""


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
