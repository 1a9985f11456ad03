"""Records of jobs: state, progress, tasks, events and errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from dcp.server.records.declaring import Hidden, OneOf, Shown

JobState = Literal["queued", "planning", "running", "publishing", "succeeded", "failed", "cancelled"]
TaskState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
FINAL_STATES: Final = ("succeeded", "failed", "cancelled")
"""States of ended jobs."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of the tasks of a job; bytes include the finished part of running tasks."""

    done_tasks: int = 0
    total_tasks: int = 0
    done_bytes: int = 0
    total_bytes: int = 0


_IsRetryable = Annotated[bool, Shown("True if a repetition may succeed.")]
_IsEnvironment = Annotated[
    bool,
    Shown("A machine, network or storage failed, not the data of the job.", may_be_absent=True),
]
_FailedTask = Annotated[int | None, Shown("The number of the task that failed.", may_be_absent=True)]


@dataclass(frozen=True, slots=True)
class JobFailure:
    """The failure of a job or task: the ``type`` of the exception, and a text for the user.

    ``is_environment``: a machine, network or storage failed, not the job or its data.
    """

    type: Annotated[str, Shown("Class of the exception.")]
    detail: Annotated[str, Shown("Message for the user, with the remedy.")]
    is_retryable: _IsRetryable = True
    is_environment: _IsEnvironment = False
    task: _FailedTask = None


@dataclass(frozen=True, slots=True)
class JobWaiting:
    """The last failure of a job that runs again at ``next_attempt_at`` or on a manual retry.

    ``since`` is the time of the first of ``count`` consecutive failures.
    """

    type: Annotated[str, Shown("Class of the exception.")]
    detail: Annotated[str, Shown("Message for the user, with the remedy.")]
    since: Annotated[datetime, Shown("The time of the first consecutive failure.")]
    next_attempt_at: Annotated[datetime, Shown("A manual retry runs the job earlier.")]
    count: Annotated[int, Shown("The number of consecutive failures.")]
    is_retryable: _IsRetryable = False
    is_environment: _IsEnvironment = False
    task: _FailedTask = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job. ``is_ending``: cancelled or failed, with tasks still stopping."""

    id: int
    kind: Annotated[str, Shown("Kind of the job, such as convert.")]
    state: Annotated[
        str,
        OneOf(JobState),
        Shown("planning: tasks are being made. publishing: the result is being put in place."),
    ]
    params: Annotated[Mapping[str, Any], Shown("Parameters of the kind.")]
    created_by: Annotated[str, Shown("Account or key, such as key:ci.")]
    created_at: datetime
    is_ending: Annotated[
        bool, Shown("True if the job was cancelled or failed, and tasks are still stopping.")
    ] = False
    priority: Annotated[int, Shown("Jobs with a higher priority run first.")] = 0
    root: Annotated[str | None, Shown("Root in which the job reads or writes; null: none or several.")] = None
    checkpoint_id: Annotated[int | None, Shown("Checkpoint of the job; null: none or several.")] = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    not_before: Annotated[datetime | None, Shown("The time of the next attempt.")] = None
    cancel_requested_at: datetime | None = None
    attempt: Annotated[int, Shown("Failed attempts of the present phase.")] = 0
    max_attempts: Annotated[int, Shown("Number of failed attempts after which the job fails.")] = 0
    progress: Annotated[JobProgress | None, Shown("null before the tasks are known.")] = None
    result: Annotated[
        Mapping[str, Any] | None, Shown("Result of a job that succeeded; members depend on the kind.")
    ] = None
    is_result_whole: Annotated[
        bool,
        Shown(
            "False in lists for a large result, reduced to its short members. Get the job for all of it.",
            may_be_absent=True,
        ),
    ] = True
    error: Annotated[JobFailure | None, Shown("Failure of a job that failed.")] = None
    waiting: Annotated[
        JobWaiting | None,
        Shown("Failure after which the job waits for its next attempt.", may_be_absent=True),
    ] = None
    is_unserved: Annotated[
        bool,
        Shown("True if the job has not ended and no running worker supports its kind.", may_be_absent=True),
    ] = False
    document_id: Annotated[int | None, Hidden()] = None  # document with the complete large result
    dedup_key: Annotated[str | None, Hidden()] = None
    owner: Annotated[str, Hidden()] = ""  # account for limits
    key_id: Annotated[int | None, Hidden()] = None

    @property
    def is_final(self) -> bool:
        """True for an ended job."""
        return self.state in FINAL_STATES


@dataclass(frozen=True, slots=True)
class JobTask:
    """One task of a job."""

    number: Annotated[int, Shown("Number of the task in its job.")]
    state: Annotated[str, OneOf(TaskState)]
    attempt: Annotated[int, Shown("Failed attempts.")]
    done_bytes: Annotated[int, Shown("Bytes read or written so far.")]
    weight_bytes: Annotated[int, Shown("Bytes that the whole task reads or writes.")]
    not_before: Annotated[datetime | None, Shown("Time of the next attempt.")] = None
    error: Annotated[JobFailure | None, Shown("Last failure.")] = None
    id: Annotated[int, Hidden()] = 0
    job_id: Annotated[int, Hidden()] = 0
    payload: Annotated[Mapping[str, Any], Hidden()] = field(default_factory=dict)  # set for claimed tasks


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a job. Ids increase, so a reader can continue after the last id."""

    id: int
    job_id: int
    kind: Annotated[str, Shown(examples=("submitted", "state", "retry", "cancel_requested", "ending"))]
    at: datetime
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobLogLine:
    """An event of a job as a sentence."""

    id: Annotated[int, Shown("Increases with time.")]
    at: datetime
    kind: Annotated[str, Shown("Kind of the event, such as state.")]
    text: Annotated[str, Shown("The event as a sentence.")]
    data: Annotated[Mapping[str, Any], Shown("Members that depend on the kind.")]


@dataclass(frozen=True, slots=True)
class JobThroughput:
    """Throughput of the tasks of a job over the ``seconds`` since their start; None before the first
    progress."""

    job_id: int
    state: Annotated[str, OneOf(JobState)]
    done_bytes: int
    total_bytes: int
    seconds: Annotated[
        float | None, Shown("Time from the start of the tasks to now or to the end of the job.")
    ]
    bytes_per_second: Annotated[float | None, Shown("Mean rate since the start of the tasks.")]
    seconds_left: Annotated[float | None, Shown("Estimate at this rate; null once the job has ended.")]
