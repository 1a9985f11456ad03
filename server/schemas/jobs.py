"""Jobs: what is to be done, how far it is, and what has happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, Union

from pydantic import Field, create_model

from dcp.server.jobs.kinds import KINDS
from dcp.server.jobs.ledger import Job, JobEvent, JobProgress, JobTask
from dcp.server.jobs.ledger.states import JobState, Json, TaskState
from dcp.server.schemas.common import Answer, Request, optional_rfc3339, rfc3339

__all__ = [
    "JobAnswer",
    "JobErrorAnswer",
    "JobEventAnswer",
    "JobList",
    "NewJob",
    "ProgressAnswer",
    "TaskAnswer",
    "TaskList",
    "WaitingAnswer",
]


class _AnyJob(Request):
    """What all new jobs have in common; each kind has its own ``kind`` and ``params``."""

    priority: int = Field(default=0, ge=-100, le=100, description="The higher the sooner.")

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
    _MODELS: Final = tuple(_new_job(name, KINDS[name].params) for name in sorted(KINDS))
    NewJob = Annotated[Union[_MODELS], Field(discriminator="kind")]  # noqa: UP007 - of a tuple
"""The body that submits a job: one of the kinds with its parameters."""


class ProgressAnswer(Answer):
    """Of the tasks of a job; bytes count what is done of those that still run, too."""

    done_tasks: int
    total_tasks: int
    done_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, progress: JobProgress) -> Self:
        """As it is now."""
        return cls(**progress.document())


class JobErrorAnswer(Answer):
    """Why it failed."""

    type: str
    detail: str
    is_retryable: bool = Field(description="Whether the same may work at another time.")
    is_environment: bool = Field(
        default=False, description="A machine, a network or a storage is at fault, and not the job's data."
    )
    task: int | None = Field(default=None, description="The number of the task that failed.")


class WaitingAnswer(JobErrorAnswer):
    """Why the last attempt failed, where another one follows; a job that has ended has an ``error``."""

    since: str = Field(description="The first such failure in a row.")
    next_attempt_at: str = Field(description="Or as soon as the job is retried by hand.")
    count: int = Field(description="How many have failed so.")

    @classmethod
    def of(cls, waiting: Json) -> Self:
        """What the ledger keeps."""
        plain = dict(waiting)
        since, upcoming = plain.pop("since_seconds"), plain.pop("next_seconds")
        return cls(since=rfc3339(since), next_attempt_at=rfc3339(upcoming), **plain)


class JobAnswer(Answer):
    """A job. ``is_ending``: it was cancelled or has failed, and is being stopped and cleared away."""

    id: int
    kind: str
    state: JobState
    is_ending: bool
    priority: int
    params: dict[str, Any]
    root: str | None
    checkpoint_id: int | None
    created_by: str
    created_at: str
    started_at: str | None
    finished_at: str | None
    not_before: str | None = Field(description="When it is tried again.")
    cancel_requested_at: str | None
    attempt: int = Field(description="Of the present phase: how many have failed.")
    max_attempts: int
    progress: ProgressAnswer | None
    result: dict[str, Any] | None
    is_result_whole: bool = Field(
        default=True,
        description="In lists false for a large one: this is what is short of it. Ask for the job.",
    )
    error: JobErrorAnswer | None
    waiting: WaitingAnswer | None = None

    @classmethod
    def of(cls, job: Job, progress: JobProgress | None = None) -> Self:
        """A row of the ledger; ``progress`` is that of a job which has not ended."""
        kept = None if job.progress is None else ProgressAnswer(**job.progress)
        return cls(
            id=job.id,
            kind=job.kind,
            state=job.state,
            is_ending=job.is_ending,
            priority=job.priority,
            params=dict(job.params),
            root=job.root,
            checkpoint_id=job.checkpoint_id,
            created_by=job.created_by,
            created_at=rfc3339(job.created_seconds),
            started_at=optional_rfc3339(job.started_seconds),
            finished_at=optional_rfc3339(job.finished_seconds),
            not_before=optional_rfc3339(job.not_before_seconds or None),
            cancel_requested_at=optional_rfc3339(job.cancel_seconds),
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            progress=kept if progress is None else ProgressAnswer.of(progress),
            result=None if job.result is None else dict(job.result),
            is_result_whole=job.is_result_whole,
            error=None if job.error is None else JobErrorAnswer(**job.error),
            waiting=None if job.waiting is None else WaitingAnswer.of(job.waiting),
        )


class JobList(Answer):
    """A page, newest first."""

    items: list[JobAnswer]
    next_cursor: str | None


class TaskAnswer(Answer):
    """One task of a job, in the order of ``number``; what it has to do is the service's own business."""

    number: int
    state: TaskState
    attempt: int
    done_bytes: int
    weight_bytes: int
    not_before: str | None
    error: JobErrorAnswer | None

    @classmethod
    def of(cls, task: JobTask) -> Self:
        """A row of the ledger."""
        return cls(
            number=task.number,
            state=task.state,
            attempt=task.attempt,
            done_bytes=task.done_bytes,
            weight_bytes=task.weight_bytes,
            not_before=optional_rfc3339(task.not_before_seconds or None),
            error=None if task.error is None else JobErrorAnswer(**task.error),
        )


class TaskList(Answer):
    """A page, by number."""

    items: list[TaskAnswer]
    next_cursor: str | None


class JobEventAnswer(Answer):
    """Something happened to a job: the ``data`` of a server-sent event."""

    id: int
    job_id: int
    kind: str = Field(examples=["submitted", "state", "retry", "cancel_requested", "ending"])
    at: str
    data: dict[str, Any]

    @classmethod
    def of(cls, event: JobEvent) -> Self:
        """A row of the ledger."""
        return cls(
            id=event.id,
            job_id=event.job_id,
            kind=event.kind,
            at=rfc3339(event.at_seconds),
            data=dict(event.data),
        )
