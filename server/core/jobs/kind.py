"""Kinds of jobs: planning, tasks, publishing and recording of a job.

A job is planned, then its tasks run in any order and in parallel, then it is published. These three phases
run in a subprocess without the database, which may be killed at any time and run again:

- `Kind.plan` writes only in ``context.work_folder``, or under names derived from ``context.attempt_name``.
  The ledger stores the name before the plan begins, so `Kind.clear_plans` finds leftovers of a lost plan.
- `Kind.run_task` may be repeated while an earlier attempt still runs: its output must be identical, or go to
  a place named after ``context.attempt_name``.
- `Kind.publish` is one atomic step. If the worker misses its end, the step is called again and returns the
  same result.
- `Kind.discard` removes the output of tasks of a cancelled or failed job, never published results.

`Kind.prepare` and `Kind.record` run in the worker with the database: `prepare` reads facts before planning,
`record` writes the result in the transaction that completes the job.
"""

from __future__ import annotations

import errno
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar

from pydantic import Field
from sqlalchemy import Connection

from dcp.server.catalog.inputs import MAX_ID, OneLine, Request
from dcp.server.core.jobs.ledger.rows import JobSpec, Json, TaskSpec
from dcp.server.core.problems import ProblemError
from dcp.server.core.roots import Roots
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings
from dcp.server.records.jobs import Job
from dcp.storage.errors import CheckpointError, StorageError

__all__ = [
    "CheckpointId",
    "Globs",
    "JobContext",
    "JobPlan",
    "Kind",
    "Parameters",
    "PermanentJobError",
    "PlainText",
    "ReportProgress",
    "TaskSpec",
    "TransientJobError",
    "UnavailableJobError",
    "is_environment",
    "is_retryable",
]


class Parameters(Request):
    """Base of the parameters of jobs."""

    def digest(self) -> str:
        """Return a digest of the parameters for deduplication keys."""
        document = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:40]


CheckpointId = Annotated[int, Field(ge=1, le=MAX_ID)]

PlainText = Annotated[OneLine, Field(min_length=1, max_length=1024)]

Globs = Annotated[tuple[PlainText, ...], Field(min_length=1, max_length=256, strict=False)]
"""Shell globs of tensor and value names, as in `dcp.load`."""


P = TypeVar("P", bound=Parameters)

_PASSING_STATUS: Final = frozenset({429, 502, 503, 504})
_OF_THE_JOB: Final = frozenset(
    {
        errno.E2BIG,
        errno.EBADF,
        errno.EEXIST,
        errno.EFBIG,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EXDEV,
    }
)
"""Permanent errors of a name, a file or a call."""

ReportProgress = Callable[[int], None]
"""Callback with the bytes done so far; may be called often."""


class PermanentJobError(Exception):
    """A failure that a repetition cannot fix."""


class TransientJobError(Exception):
    """A failure that a repetition may fix."""


class UnavailableJobError(TransientJobError):
    """A required resource is unreachable."""


def is_retryable(error: BaseException) -> bool:
    """Return True if a repetition may help: storage, network and memory errors, and 5xx problems."""
    if isinstance(error, ProblemError):
        return error.status >= 500 or error.status == 429
    if isinstance(error, CheckpointError) and not isinstance(error, StorageError | TimeoutError):
        return False
    return isinstance(error, TransientJobError | OSError | TimeoutError | EOFError | MemoryError)


def is_environment(error: BaseException) -> bool:
    """Return True for faults of a machine, network or storage rather than of the job or its data.

    Examples are missing space or permission, and unreachable or overloaded storage.
    """
    if isinstance(error, ProblemError):
        if not isinstance(error.__cause__, OSError):
            return error.status in _PASSING_STATUS
        error = error.__cause__
    if isinstance(error, UnavailableJobError):
        return True
    return isinstance(error, OSError) and error.errno not in _OF_THE_JOB


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The context of planning, tasks and publishing.

    ``work_folder`` is an empty folder of this attempt, removed afterwards. ``settings`` exclude the database
    URL, unless the kind ``needs_database``, and settings of other features. ``prepared`` is the result of
    `Kind.prepare`.
    """

    settings: Settings
    job_id: int
    task_number: int | None
    attempt_name: str  # unique for each attempt
    work_folder: Path
    prepared: Json = field(default_factory=dict)

    @property
    def earlier_attempts(self) -> list[str]:
        """Return the names of all earlier attempts at a phase of this job."""
        stem, _, fence = self.attempt_name.rpartition("-")
        return [f"{stem}-{number}" for number in range(1, int(fence))]

    @cached_property
    def roots(self) -> Roots:
        """The configured roots."""
        return Roots(self.settings.roots)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Independent tasks, and data for publishing, as plain data (JSON).

    Every task receives ``plan_data["shared"]`` besides its own payload.
    """

    tasks: Sequence[TaskSpec]
    plan_data: Json = field(default_factory=dict)


class Kind(ABC, Generic[P]):
    """A kind of job. A feature lists one object of each kind in ``kinds``."""

    name: ClassVar[str]
    about: ClassVar[str] = ""  # one sentence for users
    scope: ClassVar[Scope]  # required scope
    button: ClassVar[str] = ""  # label on the checkpoint page; the parameters need only the checkpoint
    params: type[P]
    needs_database: ClassVar[bool] = False  # such tasks stay on this machine
    max_attempts: ClassVar[int] = 3
    waits: ClassVar[bool] = True  # wait for unreachable resources instead of failing
    leaves_plans: ClassVar[bool] = False  # plans reserve resources outside of the work folder
    has_own_slot: ClassVar[bool] = False  # one runs per worker in addition to `concurrency`
    feature: str = ""  # set by the feature
    preload: ClassVar[tuple[str, ...]] = ()  # modules for subprocesses only

    @classmethod
    def dedup_key(cls, params: P) -> str:
        """Return the key for deduplication: an unfinished job with the same key is joined."""
        return f"{cls.name}:{params.digest()}"

    @classmethod
    def result_key(cls, params: P) -> str:
        """Return the key of the result: pages show the newest job with the key."""
        return cls.dedup_key(params)

    @classmethod
    def new_job(cls, params: P, created_by: str, **more: Any) -> JobSpec:
        """Return a job with ``params``; ``more`` are further fields of `JobSpec`."""
        return JobSpec(
            kind=cls.name,
            params=params.model_dump(mode="json"),
            created_by=created_by,
            dedup_key=cls.dedup_key(params),
            result_key=cls.result_key(params),
            max_attempts=cls.max_attempts,
            **more,
        )

    @abstractmethod
    def specify(self, connection: Connection, params: P, caller: Principal, settings: Settings) -> JobSpec:
        """Return the job for ``params`` if ``caller`` may see and change the named objects.

        Raises ProblemError like a request, such as NotFoundError for invisible objects.
        """

    def prepare(self, connection: Connection, params: P) -> Json:
        """Read facts of the catalog for planning."""
        return {}

    @abstractmethod
    def plan(self, context: JobContext, params: P) -> JobPlan:
        """Return the tasks of the job."""

    @abstractmethod
    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """Run one task, and return plain data."""

    @abstractmethod
    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """Publish atomically; ``results`` have the order of the planned tasks."""

    def discard(self, context: JobContext, plan_data: Json) -> None:
        """Remove leftovers of an abandoned job."""

    def clear_plans(self, context: JobContext, params: P) -> None:
        """Remove leftovers of ``context.earlier_attempts`` at planning.

        Called for kinds with ``leaves_plans`` whose job ended without a plan, after all attempts stopped.
        """

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Write the consequences of the result to the catalog."""


Kinds = Mapping[str, Kind[Any]]
"""Kinds by name."""
