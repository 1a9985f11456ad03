"""Kinds of jobs: a kind plans a job, does its tasks, publishes and records it.

A job is planned, then its tasks run, in any order and some of them at once, then it is published. These
three run in a subprocess that may be killed at any instant, without the database, and again if need be:

- `Kind.plan` writes nothing outside of ``context.work_folder``, or under names that follow from
  ``context.attempt_name``: the ledger knows it before the plan begins, so that `Kind.clear_plans` finds what
  a lost plan has left.
- `Kind.run_task` may be repeated, also while an earlier attempt that was believed dead still runs: what it
  writes must be the same each time, or go to a place that carries ``context.attempt_name``.
- `Kind.publish` is one atomic step. If it died after that step and before the worker heard of it, it is
  called again: it must then see that it is done and return the same result.
- `Kind.discard` clears away what tasks of a cancelled or failed job have left; never what is published.

`Kind.prepare` and `Kind.record` run in the worker, with the database: the first says what is known of the
job's subject before it is planned, the second writes the result, in the transaction that completes the job.
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
    """Parameters of a job."""

    def digest(self) -> str:
        """Return a digest of the parameters, for keys of jobs of which one at a time is unfinished."""
        document = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:40]


CheckpointId = Annotated[int, Field(ge=1, le=MAX_ID)]

PlainText = Annotated[OneLine, Field(min_length=1, max_length=1024)]

Globs = Annotated[tuple[PlainText, ...], Field(min_length=1, max_length=256, strict=False)]
"""Shell globs on the names of tensors and values, as for `dcp.load`."""


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
"""Errors of a name, a file or a call: the same at any time."""

ReportProgress = Callable[[int], None]
"""Called with the bytes that are done so far, as often as one likes."""


class PermanentJobError(Exception):
    """Trying again would fail the same way."""


class TransientJobError(Exception):
    """Worth another attempt."""


class UnavailableJobError(TransientJobError):
    """Something that the job needs cannot be reached now."""


def is_retryable(error: BaseException) -> bool:
    """Return True if another attempt may help: errors of storage, network and memory, and problems of 5xx."""
    if isinstance(error, ProblemError):
        return error.status >= 500 or error.status == 429
    if isinstance(error, CheckpointError) and not isinstance(error, StorageError | TimeoutError):
        return False
    return isinstance(error, TransientJobError | OSError | TimeoutError | EOFError | MemoryError)


def is_environment(error: BaseException) -> bool:
    """Return True if a machine, a network or a storage is at fault, and not the job or its data: no space,
    no permission, a storage that is away or does not keep up."""
    if isinstance(error, ProblemError):
        if not isinstance(error.__cause__, OSError):
            return error.status in _PASSING_STATUS
        error = error.__cause__
    if isinstance(error, UnavailableJobError):
        return True
    return isinstance(error, OSError) and error.errno not in _OF_THE_JOB


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The context of plan, tasks and publishing, beside their arguments.

    ``work_folder`` is empty, of this attempt alone, and removed after it. ``settings`` come without the
    database's URL, unless the kind ``needs_database``, and without the settings of other features.
    ``prepared`` is what `Kind.prepare` returned.
    """

    settings: Settings
    job_id: int
    task_number: int | None
    attempt_name: str  # differs with each attempt
    work_folder: Path
    prepared: Json = field(default_factory=dict)

    @property
    def earlier_attempts(self) -> list[str]:
        """Names of all attempts at a phase of this job before this one, whatever became of them."""
        stem, _, fence = self.attempt_name.rpartition("-")
        return [f"{stem}-{number}" for number in range(1, int(fence))]

    @cached_property
    def roots(self) -> Roots:
        """The configured roots."""
        return Roots(self.settings.roots)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Independent tasks, and what publishing needs beside their results. All of it plain data (JSON).

    ``plan_data["shared"]`` is what every task gets beside its own payload.
    """

    tasks: Sequence[TaskSpec]
    plan_data: Json = field(default_factory=dict)


class Kind(ABC, Generic[P]):
    """A kind of job. One object of it is in ``kinds`` of a feature."""

    name: ClassVar[str]
    about: ClassVar[str] = ""  # one sentence for users: the work of its jobs
    scope: ClassVar[Scope]  # what a key needs to submit one
    button: ClassVar[str] = ""  # on the page of a checkpoint, which is all that the parameters need
    params: type[P]
    needs_database: ClassVar[bool] = False  # such tasks are never sent to other machines
    max_attempts: ClassVar[int] = 3
    waits: ClassVar[bool] = True  # for what is away; else it fails as for any other reason
    leaves_plans: ClassVar[bool] = False  # what its plans reserve is outside of the work folder
    has_own_slot: ClassVar[bool] = False  # one of them runs in each worker beside `concurrency` others
    feature: str = ""  # its name, set by the feature that has the kind
    preload: ClassVar[tuple[str, ...]] = ()  # modules that subprocesses need, and the API process does not

    @classmethod
    def dedup_key(cls, params: P) -> str:
        """Return the key of a job with ``params``: while one is unfinished, another with the same key joins
        it."""
        return f"{cls.name}:{params.digest()}"

    @classmethod
    def result_key(cls, params: P) -> str:
        """Return the key of the last result: a page with ``params`` shows the newest of the jobs that have
        it."""
        return cls.dedup_key(params)

    @classmethod
    def new_job(cls, params: P, created_by: str, **more: Any) -> JobSpec:
        """Return a job with ``params``. ``more`` are other fields of `JobSpec`."""
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
        """Return the job for ``params``, ready for the ledger, if ``caller`` may see and change what they
        name.

        Raises ProblemError, as a request would: NotFoundError for what the key may not see.
        """

    def prepare(self, connection: Connection, params: P) -> Json:
        """Facts from the catalog that planning needs. Only reads."""
        return {}

    @abstractmethod
    def plan(self, context: JobContext, params: P) -> JobPlan:
        """Return the tasks of the job."""

    @abstractmethod
    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """Do one task; the result is plain data."""

    @abstractmethod
    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """Make it so, atomically; ``results`` are in the order of the plan's tasks."""

    def discard(self, context: JobContext, plan_data: Json) -> None:
        """Clear away what is left of a job that was given up."""

    def clear_plans(self, context: JobContext, params: P) -> None:
        """Clear away what ``context.earlier_attempts`` at the plan have left; called where a kind
        ``leaves_plans`` and the job has ended without a plan. None of them is at work any more."""

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Write what follows from the result into the catalog."""


Kinds = Mapping[str, Kind[Any]]
"""By name."""
