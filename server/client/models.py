"""What the service answers with: values, that never change. Times have their time zone (UTC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail
from dcp.server.records.runs import Run

__all__ = [
    "FINAL_STATES",
    "Alias",
    "Checkpoint",
    "CheckpointDetail",
    "Chunk",
    "Diff",
    "File",
    "Job",
    "JobEvent",
    "JobFailure",
    "JobTask",
    "JobWaiting",
    "Lineage",
    "LineageEdge",
    "LineageNode",
    "ObjectDifference",
    "Progress",
    "RankShare",
    "Registered",
    "Root",
    "Run",
    "Series",
    "SeriesPoint",
    "ShardedTensor",
    "Statistics",
    "Tensor",
    "TensorDifference",
    "TensorFacts",
    "TreeNode",
    "Verification",
]

FINAL_STATES: Final = frozenset({"succeeded", "failed", "cancelled"})
"""Of jobs."""


@dataclass(frozen=True, slots=True)
class Root:
    """A place where the service finds checkpoints; ``url`` is shown to admins only.

    ``lost`` checkpoints were not found by the last scan, and are kept as they were, because they are too many
    at once; ``last_scan`` is its report.
    """

    name: str
    description: str = ""
    url: str | None = None
    is_configured: bool = True
    readonly: bool = False
    scan_every_seconds: float | None = None
    scanned_at: datetime | None = None
    scan_error: str | None = None
    lost: int = 0
    last_scan: Any = None


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """Neighbouring checkpoints of a run, ``count`` of them; ``checkpoint_id`` is of one."""

    checkpoint_id: int
    first_step: int
    last_step: int
    last_at: datetime
    count: int
    min: float
    max: float
    mean: float


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over the steps of a run; ``count`` checkpoints have it."""

    run_id: int
    metric: str
    count: int
    points: tuple[SeriesPoint, ...]


@dataclass(frozen=True, slots=True)
class Registered:
    """What came of a registration; ``id`` is None where something was deleted that nobody knew."""

    id: int | None
    root: str
    key: str
    is_new: bool
    is_present: bool
    save_id: str | None = None


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that moves from checkpoint to checkpoint of a run."""

    run_id: int
    name: str
    checkpoint_id: int
    is_protected: bool
    updated_at: datetime
    updated_by: str | None
    etag: str


@dataclass(frozen=True, slots=True)
class LineageNode:
    """A checkpoint; ``distance`` is negative for what the one asked for comes from."""

    id: int
    root: str
    key: str
    step: int | None
    format: str
    state: str
    distance: int


@dataclass(frozen=True, slots=True)
class LineageEdge:
    """``child_id`` was made of ``parent_id``."""

    child_id: int
    parent_id: int
    kind: str
    job_id: int | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Lineage:
    """Ancestors and descendants, nearest first; ``is_cut``: there are more."""

    nodes: tuple[LineageNode, ...]
    edges: tuple[LineageEdge, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint; ``role``: "data", "commit" or "other"."""

    name: str
    bytes: int
    modified_at: datetime
    role: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, or a value that is none (``kind`` "object", without dtype and shape)."""

    fqn: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """What is below one name, summed up; ``entry`` where the name itself is a tensor or a value."""

    name: str
    tensors: int
    objects: int
    bytes: int
    entry: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the file with its bytes."""

    rank: int | None
    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor and how it is cut; ``chunks`` are the first of ``chunk_count``."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunk_count: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank wrote."""

    rank: int | None
    files: int
    file_bytes: int | None
    chunks: int
    tensors: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a tensor is on one side of a difference."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same on both sides; "undecided": the job "diff" can tell of its values."""

    fqn: str
    kind: str
    before: TensorFacts | None
    after: TensorFacts | None


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A value that is not the same on both sides."""

    fqn: str
    kind: str


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs; ``tensors`` are all of them, ``objects`` the first 500 of ``object_count``."""

    a: int
    b: int
    basis: str
    counts: Mapping[str, int]
    equal_tensors: int
    equal_objects: int
    object_count: int
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """One verification; ``is_current``: the checkpoint is still what was verified."""

    id: int
    outcome: str
    mode: str
    is_current: bool
    findings: Any
    checked_bytes: int
    seconds: float
    created_at: datetime
    job_id: int | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the values of all tensors together (``total``) and of each; ``is_stale``: it was replaced since."""

    is_stale: bool
    created_at: datetime
    job_id: int | None
    total: Any
    tensor_count: int
    tensors: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the tasks of a job are."""

    done_tasks: int
    total_tasks: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class JobFailure:
    """Why a job or a task failed."""

    type: str
    detail: str
    is_retryable: bool = False
    is_environment: bool = False
    task: int | None = None


@dataclass(frozen=True, slots=True)
class JobWaiting:
    """Why the last attempt at a job failed, which is tried again at ``next_attempt_at``, or when it is
    retried by hand. ``since``: the first of ``count`` such failures in a row."""

    type: str
    detail: str
    since: datetime
    next_attempt_at: datetime
    count: int
    is_retryable: bool = False
    is_environment: bool = False
    task: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Something to be done. ``is_ending``: it was cancelled or has failed, and is being cleared away."""

    id: int
    kind: str
    state: str
    params: Mapping[str, Any]
    created_by: str
    created_at: datetime
    is_ending: bool = False
    priority: int = 0
    root: str | None = None
    checkpoint_id: int | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    not_before: datetime | None = None
    cancel_requested_at: datetime | None = None
    attempt: int = 0
    max_attempts: int = 0
    progress: Progress | None = None
    result: Mapping[str, Any] | None = None
    is_result_whole: bool = True
    error: JobFailure | None = None
    waiting: JobWaiting | None = None

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self.state in FINAL_STATES


@dataclass(frozen=True, slots=True)
class JobTask:
    """One task of a job."""

    number: int
    state: str
    attempt: int
    done_bytes: int
    weight_bytes: int
    not_before: datetime | None = None
    error: JobFailure | None = None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something happened to a job. ``kind`` "progress" and "end" come without ``id``; "end" is the last."""

    kind: str
    data: Mapping[str, Any]
    id: int | None = None
    at: datetime | None = None
