"""Types of the ledger: jobs, tasks, claims, and the backoff between attempts."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from dcp.server.records.jobs import Job, JobTask

__all__ = [
    "MAX_DEDUP_KEY_CHARACTERS",
    "Backoff",
    "Claim",
    "Held",
    "JobEventRow",
    "JobRow",
    "JobSpec",
    "Json",
    "Phase",
    "StaleFenceError",
    "TaskRow",
    "TaskSpec",
]

Json = Mapping[str, Any]
"""An object of plain data, as JSON has it."""

Phase = Literal["plan", "task", "publish", "discard"]
"""The phases that are claimed: planning, one task, publishing, or clearing away after a job was given up."""

MAX_DEDUP_KEY_CHARACTERS: Final = 100


class StaleFenceError(Exception):
    """The claim is not valid any more: its lease was over and another worker took it, or it was done.

    Nothing of the refused call was written, and the worker must not try again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job to be done. The higher its ``priority`` (-100 to 100) the sooner.

    ``root`` is the name of the root that it writes to, or reads where it writes to none. The job is about
    ``checkpoint_id``, and ``subjects`` are ids of all other checkpoints that it names: keys that may not see
    its root, or that of one of these, do not see the job. Where ``dedup_key`` is given there is at most one
    unfinished job with it. ``result_key`` finds the last job of several whose results replace each other; it
    is the ``dedup_key`` unless given.
    """

    kind: str
    params: Json
    created_by: str
    priority: int = 0
    root: str | None = None
    checkpoint_id: int | None = None
    subjects: Sequence[int] = ()
    dedup_key: str | None = None
    result_key: str | None = None
    max_attempts: int = 3
    not_before_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task of a plan. ``payload`` is what it needs beside what all of them share; ``weight_bytes`` is its
    share of the progress."""

    payload: Json
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow(Job):
    """A job in the ledger. ``document_id``: the document with all of a large result."""

    document_id: int | None
    dedup_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow(JobTask):
    """A task in the ledger: claimed ones have a payload."""

    id: int
    job_id: int
    payload: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEventRow:
    """An event of a job; ids grow, so that a reader continues behind the last one it has seen."""

    id: int
    job_id: int
    kind: str
    data: Json
    at_seconds: float


@dataclass(frozen=True, slots=True)
class Held:
    """Names a claim when it is renewed: ``task_id`` is None for the phases of the job itself."""

    job_id: int
    task_id: int | None
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Work for a worker, for as long as its lease lasts."""

    phase: Phase
    job: JobRow
    task: TaskRow | None
    fence: int

    @property
    def held(self) -> Held:
        """Its name."""
        return Held(self.job.id, None if self.task is None else self.task.id, self.fence)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause after the failed attempt number n: twice as long each time, and up to a half longer, by the
    task, so that tasks that failed together are not tried together.

    ``patience_seconds``: for how long errors of the environment in a row are waited for.
    """

    first_seconds: float = 2.0
    most_seconds: float = 300.0
    patience_seconds: float = 86_400.0

    def seconds(self, attempt: int, salt: int = 0) -> float:
        """``attempt`` counts from 1."""
        plain = min(self.most_seconds, self.first_seconds * 2.0 ** min(attempt - 1, 30))
        return plain * (1.0 + (zlib.crc32(f"{salt}/{attempt}".encode()) % 1000) / 2000.0)
