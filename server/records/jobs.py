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

    type: str
    detail: str
    is_retryable: _IsRetryable = True
    is_environment: _IsEnvironment = False
    task: _FailedTask = None


@dataclass(frozen=True, slots=True)
class JobWaiting:
    """The last failure of a job that runs again at ``next_attempt_at`` or on a manual retry.

    ``since`` is the time of the first of ``count`` consecutive failures.
    """

    type: str
    detail: str
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
    kind: str
    state: Annotated[str, OneOf(JobState)]
    params: Mapping[str, Any]
    created_by: str
    created_at: datetime
    is_ending: bool = False
    priority: int = 0
    root: str | None = None
    checkpoint_id: int | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    not_before: Annotated[datetime | None, Shown("The time of the next attempt.")] = None
    cancel_requested_at: datetime | None = None
    attempt: Annotated[int, Shown("Failed attempts of the present phase.")] = 0
    max_attempts: int = 0
    progress: JobProgress | None = None
    result: Mapping[str, Any] | None = None
    is_result_whole: Annotated[
        bool,
        Shown(
            "False in lists for a large result, reduced to its short members. Get the job for all of it.",
            may_be_absent=True,
        ),
    ] = True
    error: JobFailure | None = None
    waiting: Annotated[JobWaiting | None, Shown(may_be_absent=True)] = None
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

    number: int
    state: Annotated[str, OneOf(TaskState)]
    attempt: int
    done_bytes: int
    weight_bytes: int
    not_before: datetime | None = None
    error: JobFailure | None = None
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

    id: int
    at: datetime
    kind: str
    text: str
    data: Mapping[str, Any]


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
    bytes_per_second: float | None
    seconds_left: Annotated[float | None, Shown("Estimate at this rate; null once the job has ended.")]
