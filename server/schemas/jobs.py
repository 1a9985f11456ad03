"""Jobs: what is to be done, how far it is, and what has happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, Union

from pydantic import Field, create_model

from dcp.server.inputs import Request
from dcp.server.features import kinds as all_kinds
from dcp.server.jobs.ledger import JobEventRow
from dcp.server.records import jobs as records
from dcp.server.schemas.common import Answer, rfc3339
from dcp.server.schemas.records import RecordAnswer, answers

__all__ = [
    "JobAnswer",
    "JobErrorAnswer",
    "JobEventAnswer",
    "JobList",
    "LogLineAnswer",
    "LogPage",
    "NewJob",
    "ProgressAnswer",
    "TaskAnswer",
    "TaskList",
    "ThroughputAnswer",
    "WaitingAnswer",
]


class _AnyJob(Request):
    """What all new jobs have in common; each kind has its own ``kind`` and ``params``."""

    priority: int = Field(
        default=0, ge=-100, le=100, description="The higher the sooner; above 0 needs the scope admin."
    )

    if TYPE_CHECKING:
        kind: str
        params: Any


def _new_job(name: str, params: type) -> type[_AnyJob]:
    title = name.replace("_", " ").title().replace(" ", "")
    fields: dict[str, Any] = {"kind": (Literal[name], ...), "params": (params, ...)}
    doc = f"A job that is to {name}." if name != "stats" else "A job that computes statistics."
    return create_model(f"New{title}Job", __base__=_AnyJob, __doc__=doc, **fields)


if TYPE_CHECKING:
    NewJob = _AnyJob
else:
    _MODELS: Final = tuple(_new_job(name, all_kinds()[name].params) for name in sorted(all_kinds()))
    NewJob = Annotated[Union[_MODELS], Field(discriminator="kind")]  # noqa: UP007 - of a tuple
"""The body that submits a job: one of the kinds with its parameters."""


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


class JobList(Answer):
    """A page, newest first."""

    items: list[JobAnswer]
    next_cursor: str | None


@answers(records.JobTask)
class TaskAnswer(RecordAnswer):
    """One task of a job, in the order of ``number``; what it has to do is the service's own business."""

    @classmethod
    def of(cls, found: Any, **others: Any) -> Self:
        """A row of the ledger."""
        return super().of(found, not_before=found.not_before_seconds or None, **others)


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
