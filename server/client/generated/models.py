# Generated from the OpenAPI document by `make client`.
"""Answers of the service, and options of its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A person who signs in, or a service account, which uses only keys."""

    id: int
    kind: str
    """person: signs in. service: uses only keys."""
    name: str
    """Unique among accounts of the kind, and never changed."""
    actor: str
    """The name in the audit log."""
    title: str
    """The full name from the provider, or the description of a service account."""
    email: str | None = None
    """The verified address from the provider."""
    issuer: str | None = None
    """The provider of a person."""
    groups: tuple[str, ...]
    """Groups at the last sign-in."""
    created_at: datetime
    seen_at: datetime | None = None
    """The last sign-in of a person."""
    disabled_at: datetime | None = None
    """Disabled since; its sessions and keys do not work."""
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A name that moves between checkpoints of a run. ``is_protected``: only admins move the alias."""

    run_id: int
    name: str
    """Name of the alias, such as best."""
    checkpoint_id: int
    is_protected: bool
    """Only admins move the alias."""
    updated_at: datetime
    updated_by: str | None = None
    """Account or key of the last change."""
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """A change with its actor and target."""

    id: int
    at: datetime
    actor: str
    action: str
    target: str
    detail: Mapping[str, Any] | None = None
    """Members that depend on the action, such as old and new values."""
    request_id: str | None = None
    """X-Request-Id of the request; null: the change was made by a job or the command line."""
    address: str | None = None
    """IP address of the client."""
    root: str | None = None
    """The root of the target; null: none or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BinValues:
    """Aggregates of the values in a bin; ``last`` belongs to the highest step."""

    name: str
    """bytes, save_seconds, or the name of a metric."""
    count: int
    """Checkpoints with this value."""
    min: float
    max: float
    mean: float
    last: float
    """Value of the highest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint with its labels. ``run`` is the key of the run, ``key`` the key of the checkpoint."""

    id: int
    """Number of the checkpoint in the catalog."""
    root: str
    """Name of the root."""
    run_id: int
    """The `id` of the run."""
    run: str
    """Key of the folder of the checkpoint; empty: the root."""
    key: str
    """Path of the checkpoint in the root."""
    name: str
    """Last part of the key."""
    step: int | None = None
    """Training step; null: not recorded and not in the name."""
    format: str
    """Format of the files."""
    state: str
    """incomplete: data without a commit. unreadable: the index is damaged or refused. vanished:
    missing in storage without a deletion. deleted: can be restored until `purge_after`. purged:
    removed from storage."""
    committed_at: datetime
    """Time of the commit."""
    discovered_at: datetime
    """Time of the registration or of the first scan that found it."""
    updated_at: datetime
    """Time of the last change in the catalog."""
    deleted_at: datetime | None = None
    """Time of the deletion in the catalog."""
    purge_after: datetime | None = None
    """A deleted checkpoint can be restored until this time."""
    bytes: int
    """Size of all files."""
    file_count: int
    world_size: int | None = None
    """Number of ranks that saved it; null: unknown."""
    structure_id: int | None = None
    """Checkpoints with equal names, shapes and dtypes have the same id."""
    dtypes: Mapping[str, int] | None = None
    """Bytes by dtype."""
    verification: str
    """Result of the last verification of this content."""
    verified_at: datetime | None = None
    """Time of the last verification."""
    problem: str | None = None
    """The reason why the checkpoint is unreadable, or the findings of the verification."""
    is_pinned: bool
    """A pinned checkpoint cannot be deleted, by hand or by retention."""
    registered_by: str | None = None
    """The key or person that registered the checkpoint; null: found by a scan."""
    tags: tuple[str, ...]
    aliases: tuple[str, ...]
    """Names that point to this checkpoint in its run, such as best."""
    metrics: Mapping[str, float]
    """Finite metrics by name."""
    nonfinite_metrics: Mapping[str, str]
    """Metrics with the values "nan", "inf" or "-inf", which JSON cannot express as numbers."""
    partial: tuple[str, ...]
    """The saved parts of a partial save; empty: complete."""
    version: int
    """Number that increases with each change."""
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacets:
    """The number of listed checkpoints (``count``), and the numbers for other values of each filter."""

    count: int
    """Number of listed checkpoints."""
    is_cut: bool
    """Always false: all checkpoints are counted."""
    facets: tuple[Facet, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Box of a tensor, and the file with its bytes."""

    rank: int | None = None
    """Rank in the name of the file; null: none."""
    file: str
    offsets: tuple[int, ...]
    """Start of the box in the tensor, by dimension."""
    sizes: tuple[int, ...]
    """Lengths of the box, by dimension."""
    bytes: int
    file_offset: int | None = None
    """Position of the first byte in the file; null: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFact:
    """A fact or a member of the metadata, with the value of each run; None where a run has none."""

    name: str
    is_metadata: bool
    """True: a member of the metadata. False: a fact of the catalog."""
    values: tuple[str | None, ...]
    """By run, in their order; null: none."""
    differs: bool
    """The runs have different values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """Run of a comparison. ``metric`` and ``series`` are None without the metric."""

    run: Run
    newest_id: int | None = None
    """Newest committed checkpoint, the source of the facts."""
    metric: RunMetric | None = None
    """null: the run has no such metric."""
    series: Series | None = None
    """null: the run has no such metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Event for a webhook; ``state``: "waiting", "delivered", or "failed"."""

    id: int
    webhook_id: int
    message_id: str
    """The header `webhook-id`: the same in each attempt."""
    event: str
    """Kind of the event."""
    state: str
    attempts: int
    """Number of attempts."""
    max_attempts: int = 10
    status_code: int | None = None
    """Of the receiver's last answer."""
    error: str | None = None
    """Failure of the last attempt."""
    created_at: datetime
    next_attempt_at: datetime | None = None
    """null: none is left, or delivered."""
    delivered_at: datetime | None = None
    """null: not delivered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Differences. `counts` cover all tensors, `tensors` is a page of the requested tensors, `objects`
    has the first 500 of ``object_count``."""

    a: int
    """The `id` of the earlier checkpoint."""
    b: int
    """The `id` of the later checkpoint."""
    basis: str
    """values: compared by a job. checksums: by the manifests. structure: by names, shapes and dtypes."""
    counts: Mapping[str, int]
    """Differing tensors by kind."""
    equal_tensors: int
    """Number of equal tensors."""
    equal_objects: int
    """Number of equal values."""
    object_count: int
    """Number of differing values."""
    tensors: tuple[DifferingTensor, ...]
    """Differing tensors of this page."""
    objects: tuple[DifferingObject, ...]
    """The first 500 differing values."""
    matching: int | None = None
    """Requested tensors that differ."""
    job_id: int | None = None
    """Job of the comparison."""
    created_at: datetime | None = None
    """Of that job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferingObject:
    """Value that differs: the first 200 characters on both sides for plain data."""

    fqn: str
    kind: str
    before: str | None = None
    """As text, cut; of plain data."""
    after: str | None = None
    """As text, cut; of plain data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferingTensor:
    """Tensor that differs. "undecided": the job "diff" can compare the values. ``values``: differences
    found by the job."""

    fqn: str
    kind: str
    """undecided: checksums cannot decide; a job diff compares the values."""
    before: TensorType | None = None
    """In the earlier checkpoint; null: added."""
    after: TensorType | None = None
    """In the later checkpoint; null: removed."""
    values: ValueDistance | None = None
    """Differences found by the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftLayer:
    """Tensors of one layer, or of ``layers`` adjacent layers, by step."""

    name: str
    """Name of the layer, or of the first of several."""
    relative_l2: tuple[float | None, ...]
    """By step: relative L2 change; null: no finite elements."""
    changed: tuple[float | None, ...]
    """By step: share of changed elements, from 0 to 1."""
    nonfinite: tuple[int | None, ...]
    """By step: number of NaN or infinite elements."""
    layers: int = 1
    """Adjacent layers merged into this row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftStep:
    """Two neighbouring steps: checkpoint ``b`` at ``step``, and ``a`` at ``from_step``. ``added`` and
    ``removed`` count tensors. ``problem``: the reason why they could not be compared."""

    a: int
    """The `id` of the earlier checkpoint."""
    b: int
    """The `id` of the later checkpoint."""
    from_step: int | None = None
    """Step of `a`."""
    step: int | None = None
    """Step of `b`."""
    problem: str | None = None
    """Reason why the steps could not be compared; null: none."""
    added: int
    """Tensors only in `b`."""
    removed: int
    """Tensors only in `a`."""
    bytes_read: int
    """Bytes read for the comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facet:
    """The values of one filter, most frequent first. ``is_cut``: there are more values."""

    name: str
    values: tuple[FacetValue, ...]
    is_cut: bool
    """There are further values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FacetValue:
    """A value of a filter with its number of checkpoints. ``root`` and ``run_id`` describe a run."""

    value: str
    """Value of the filter."""
    count: int
    """Checkpoints with this value."""
    root: str | None = None
    """Of a run: name of its root."""
    run_id: int | None = None
    """Of a run: its `id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a checkpoint; ``role``: "data", "commit" or "other"."""

    name: str
    bytes: int
    modified_at: datetime
    role: str
    """data: contains tensors; commit: marks the folder as a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A role in a root for an account, or for the members of a group."""

    id: int
    account_id: int | None = None
    """null: the grant is for a group."""
    account: str | None = None
    """The account's name in the audit log."""
    group: str | None = None
    """null: the grant is for an account."""
    role: str
    """viewer: read. contributor: also write. operator: also convert and delete. admin: all scopes."""
    root: str | None = None
    """null: all."""
    created_by: str
    """Account or key that granted the role."""
    created_at: datetime
    updated_at: datetime
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Handover of a checkpoint to one target, and its last job."""

    target: str
    state: str
    """Of the last job; none: not handed over yet."""
    name: str | None = None
    """Of the registered model, or of the artifact."""
    version: str | None = None
    """Null before a synchronization."""
    link: str | None = None
    """Page at the target."""
    handed_over_at: datetime | None = None
    """null: not handed over yet."""
    is_marked_deleted: bool
    """The target marks the checkpoint as deleted."""
    job_id: int | None = None
    """The last job."""
    error: str | None = None
    """Error of the last job, if failed or waiting for a retry."""
    next_attempt_at: datetime | None = None
    """Time of the retry; null: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job. ``is_ending``: cancelled or failed, with tasks still stopping."""

    id: int
    kind: str
    """Kind of the job, such as convert."""
    state: str
    """planning: tasks are being made. publishing: the result is being put in place."""
    params: Mapping[str, Any]
    """Parameters of the kind."""
    created_by: str
    """Account or key, such as key:ci."""
    created_at: datetime
    is_ending: bool
    """True if the job was cancelled or failed, and tasks are still stopping."""
    priority: int
    """Jobs with a higher priority run first."""
    root: str | None = None
    """Root in which the job reads or writes; null: none or several."""
    checkpoint_id: int | None = None
    """Checkpoint of the job; null: none or several."""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    not_before: datetime | None = None
    """The time of the next attempt."""
    cancel_requested_at: datetime | None = None
    attempt: int
    """Failed attempts of the present phase."""
    max_attempts: int
    """Number of failed attempts after which the job fails."""
    progress: JobProgress | None = None
    """null before the tasks are known."""
    result: Mapping[str, Any] | None = None
    """Result of a job that succeeded; members depend on the kind."""
    is_result_whole: bool = True
    """False in lists for a large result, reduced to its short members. Get the job for all of it."""
    error: JobFailure | None = None
    """Failure of a job that failed."""
    waiting: JobWaiting | None = None
    """Failure after which the job waits for its next attempt."""
    is_unserved: bool = False
    """True if the job has not ended and no running worker supports its kind."""

    @property
    def is_final(self) -> bool:
        """True once the job has ended."""
        return self.state in ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """The failure of a job or task: the ``type`` of the exception, and a text for the user."""

    type: str
    """Class of the exception."""
    detail: str
    """Message for the user, with the remedy."""
    is_retryable: bool
    """True if a repetition may succeed."""
    is_environment: bool = False
    """A machine, network or storage failed, not the data of the job."""
    task: int | None = None
    """The number of the task that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLogLine:
    """An event of a job as a sentence."""

    id: int
    """Increases with time."""
    at: datetime
    kind: str
    """Kind of the event, such as state."""
    text: str
    """The event as a sentence."""
    data: Mapping[str, Any]
    """Members that depend on the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """Progress of the tasks of a job; bytes include the finished part of running tasks."""

    done_tasks: int
    total_tasks: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTask:
    """One task of a job."""

    number: int
    """Number of the task in its job."""
    state: str
    attempt: int
    """Failed attempts."""
    done_bytes: int
    """Bytes read or written so far."""
    weight_bytes: int
    """Bytes that the whole task reads or writes."""
    not_before: datetime | None = None
    """Time of the next attempt."""
    error: JobFailure | None = None
    """Last failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobThroughput:
    """Throughput of the tasks of a job over the ``seconds`` since their start; None before the first
    progress."""

    job_id: int
    state: str
    done_bytes: int
    total_bytes: int
    seconds: float | None = None
    """Time from the start of the tasks to now or to the end of the job."""
    bytes_per_second: float | None = None
    """Mean rate since the start of the tasks."""
    seconds_left: float | None = None
    """Estimate at this rate; null once the job has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWaiting:
    """The last failure of a job that runs again at ``next_attempt_at`` or on a manual retry."""

    type: str
    """Class of the exception."""
    detail: str
    """Message for the user, with the remedy."""
    since: datetime
    """The time of the first consecutive failure."""
    next_attempt_at: datetime
    """A manual retry runs the job earlier."""
    count: int
    """The number of consecutive failures."""
    is_retryable: bool
    """True if a repetition may succeed."""
    is_environment: bool = False
    """A machine, network or storage failed, not the data of the job."""
    task: int | None = None
    """The number of the task that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key without its secret. ``roots`` None: all roots. ``used_at`` is exact to a minute."""

    id: int
    name: str
    prefix: str
    """Beginning of the secret, to recognize the key in logs."""
    scopes: tuple[str, ...]
    """Granted scopes, without implied ones."""
    roots: tuple[str, ...] | None = None
    """Roots in which the key works; null: all."""
    created_at: datetime
    expires_at: datetime | None = None
    """null: never."""
    revoked_at: datetime | None = None
    """null: not revoked."""
    used_at: datetime | None = None
    """Exact to about a minute."""
    account_id: int | None = None
    """The account of the key; its rights bound the rights of the key."""
    account: str | None = None
    """The account's name in the audit log."""
    maker: str | None = None
    """The account or key that made the key, such as account#3; null: the command line. A key without
    account works only in roots where the account that made it is still an admin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """Limit of a subject, and its use."""

    limit: str
    used: int | None = None
    """null for a rate of bytes, which is not measured."""
    allowed: int | None = None
    """null: no limit."""
    window_seconds: float | None = None
    """Requests: `allowed` per this number of seconds."""
    is_of_process: bool
    """Each process of the API counts its own requests; `used` is the count of the answering process."""
    level: str
    """State of the use: within the limit, near it, or above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Ancestors and descendants, nearest first; ``is_cut``: more exist. ``also_in``: checkpoints with
    the same tensors under the same names, by digest."""

    nodes: tuple[LineageNode, ...]
    """Ancestors, the checkpoint itself, and descendants; nearest first."""
    edges: tuple[LineageEdge, ...]
    is_cut: bool
    """More exist than shown."""
    also_in: tuple[LineageNode, ...]
    """First 50 checkpoints with the same tensors by digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEdge:
    """``child_id`` was made of ``parent_id``."""

    child_id: int
    """The result."""
    parent_id: int
    """The source."""
    kind: str
    job_id: int | None = None
    """Job that made the result; null: training."""
    created_at: datetime
    map: str | None = None
    """Weight map of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageNode:
    """Checkpoint in a lineage; ``distance`` is negative for ancestors of the requested checkpoint."""

    id: int
    root: str
    key: str
    step: int | None = None
    format: str
    state: str
    distance: int
    """Number of jobs in between; negative for ancestors, 0 for the checkpoint itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheck:
    """Load check by names, shapes, and dtypes. ``rename``: renaming by which `dcp.load` finds missing
    names, or {}; ``renamed``: the findings with this renaming."""

    checkpoint_id: int
    answer: str
    """yes; rename: with `rename`; cast: with dtype=cast and `rename`, if any; no."""
    wanted: int
    """Names in the state."""
    plain: LoadFindings
    """Without a renaming."""
    rename: Mapping[str, str]
    """For dcp.load; {} without any."""
    renamed: LoadFindings | None = None
    """With the renaming."""
    hint: str | None = None
    """The hint of dcp.load about missing names."""
    code: str
    """Python code for the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFindings:
    """Matches of the names of a state. ``counts``: by kind of problem; ``problems``: the first 500
    each."""

    matching: int
    """Names with equal known shape and dtype."""
    counts: Mapping[str, int]
    """By kind of problem, all of them."""
    problems: tuple[LoadProblem, ...]
    """The first 500 of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProblem:
    """Name that differs between a state and the checkpoint. ``stored_fqn``: its name in the
    checkpoint."""

    kind: str
    """kind: a tensor on one side, another value on the other. unexpected: only in the checkpoint."""
    fqn: str
    """Name in the state; for an unexpected entry, name in the checkpoint."""
    stored_fqn: str | None = None
    """In the checkpoint; null if missing."""
    wanted: TensorType | None = None
    """In the state; null for values and unknown facts."""
    stored: TensorType | None = None
    """In the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTensor:
    """Statistics of a tensor. ``is_kept``: computed by a job at ``computed_at``; False: read for this
    answer."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    statistics: Mapping[str, Any] | None = None
    """null: not numeric."""
    is_kept: bool
    """true: computed by a job; false: read for this answer."""
    computed_at: datetime | None = None
    """By the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPlace:
    """Value of a metric, and its checkpoint."""

    value: float
    step: int | None = None
    checkpoint_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Note on a run or checkpoint."""

    id: int
    root: str
    run_id: int
    run: str
    """Key of the run."""
    checkpoint_id: int | None = None
    """null: the note is on the run as a whole."""
    checkpoint_key: str | None = None
    """null: the note is on the run."""
    text: str
    """Markdown: CommonMark with tables and strikethrough."""
    author: str
    created_at: datetime
    edited_at: datetime | None = None
    """null: never edited."""
    edited_by: str | None = None
    """null: never edited."""
    version: int
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteVersion:
    """Current or earlier text of a note."""

    version: int
    text: str
    author: str
    """The author of this text."""
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """Neighbouring ranks; ``seconds`` are by phase, of the slowest of them, in the order of the
    phases."""

    first_rank: int
    last_rank: int
    slowest_rank: int
    """Rank with the longest total of phases."""
    total_seconds: float
    """Seconds of the slowest rank in all top-level phases."""
    seconds: tuple[float | None, ...]
    """By phase: seconds of the slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Stored limits for an account, key, or root, in place of the defaults."""

    id: int
    kind: str
    subject: str
    """Account: account#3, or key#3 for a key without an account. Key: id. Root: name."""
    limits: Mapping[str, Any]
    """By name; null: no limit; absent: the default."""
    note: str
    """Text for admins."""
    created_at: datetime
    updated_at: datetime
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """Files of a rank; ``rank`` None: files without a rank in their names."""

    rank: int | None = None
    """null: files without a rank in their names."""
    files: int
    """Number of files."""
    file_bytes: int | None = None
    """Size of the files; null: unknown."""
    chunks: int
    """Number of boxes of tensors."""
    tensors: int
    """Number of tensors with a box here."""
    tensor_bytes: int
    """Bytes of the boxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The result of a registration."""

    id: int | None = None
    """null: an unknown checkpoint was reported as deleted."""
    root: str
    key: str
    is_new: bool
    """True if the catalog did not have the checkpoint."""
    is_present: bool
    """True if storage has the checkpoint."""
    save_id: str | None = None
    """Unique id that the writer gave the save."""
    warnings: tuple[str, ...] = ()
    """Warnings about byte limits of the account or root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionDecision:
    """Checkpoint with the reasons to keep; deleted without reasons. ``drops``: parts to drop from a
    kept checkpoint, with ``dropped_bytes`` of tensors."""

    checkpoint_id: int
    key: str
    step: int | None = None
    bytes: int
    reasons: tuple[str, ...]
    """Reasons to keep the checkpoint; empty: it is deleted."""
    drops: tuple[str, ...] = ()
    """Parts to drop, for example optimizer."""
    dropped_bytes: int = 0
    """Of their tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """A retention policy for some runs; ``keep`` as in `dcp.Retention`."""

    id: int
    name: str
    root: str
    run_glob: str
    """Glob for the keys of the runs."""
    keep: Mapping[str, Any]
    """As in the request."""
    grace_seconds: float
    """Time in which a deleted checkpoint can be restored."""
    interval_seconds: float
    """Time between two applications of the policy."""
    is_enabled: bool
    version: int
    created: datetime
    updated: datetime
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPreview:
    """Preview of a policy for one run; ``checkpoints``: up to 1,000, deletions first."""

    run_id: int
    run: str
    """Key of the run."""
    kept: int
    """Number of kept checkpoints."""
    deleted: int
    """Number of checkpoints to delete."""
    deleted_bytes: int
    """Size of the checkpoints to delete."""
    checkpoints: tuple[RetentionDecision, ...]
    """Up to 1,000; deletions first."""
    unjudged: tuple[str, ...]
    """Rules by a metric that no checkpoint has; such rules keep all checkpoints."""
    dropped: int = 0
    """Kept checkpoints that lose a part."""
    dropped_bytes: int = 0
    """Of the tensors of these parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionTotals:
    """A preview of a policy for all runs together."""

    runs: int
    """Number of matching runs."""
    kept: int
    """Number of kept checkpoints."""
    kept_bytes: int
    """Size of the kept checkpoints."""
    deleted: int
    """Number of checkpoints to delete."""
    deleted_bytes: int
    """Freed once the grace is over."""
    unjudged_runs: int
    """Runs with a rule by an unknown metric."""
    is_cut: bool
    """Always false: all runs are counted."""
    dropped: int = 0
    """Kept checkpoints that lose a part."""
    dropped_bytes: int = 0
    """Of the tensors of these parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A configured place of checkpoints. Only admins see ``url``."""

    name: str
    description: str
    """Text of the settings."""
    url: str | None = None
    """The place of the root; only for keys with the scope admin."""
    is_configured: bool
    """False: removed from the settings; its rows stay."""
    readonly: bool
    """True: checkpoints cannot be deleted or converted into this root."""
    scan_every_seconds: float | None = None
    """None: only on request."""
    scanned_at: datetime | None = None
    """End of the last scan."""
    scan_error: str | None = None
    """Failure of the last scan; null: none."""
    lost: int = 0
    """Checkpoints that the last scan missed but kept, because too many were missing at once. Confirm a
    real loss with a scan job and accept_lost."""
    last_scan: Any = None
    """The report of the last complete scan: found, opened, new, vanished, trouble, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCheck:
    """State of a root's storage: reachable, and identical to the known location."""

    root: str
    is_ok: bool
    """The storage is reachable and is the known one."""
    detail: str | None = None
    """Problem, or null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule: submit jobs (``actions``) on ``event`` for checkpoints that meet ``condition``."""

    id: int
    name: str
    event: str
    """Event that starts the jobs."""
    condition: Mapping[str, Any]
    """As in the request."""
    actions: tuple[Mapping[str, Any], ...]
    """As in the request."""
    is_enabled: bool
    version: int
    created: datetime
    updated: datetime
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A folder of checkpoints. Counts, sums and latest values cover committed checkpoints."""

    id: int
    root: str
    key: str
    """Relative to the root; empty: the root."""
    checkpoint_count: int
    """Number of committed checkpoints."""
    latest_step: int | None = None
    """Highest step of a committed checkpoint."""
    latest_at: datetime | None = None
    """Commit time of the newest checkpoint."""
    bytes: int
    """Bytes of committed checkpoints."""
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunActivity:
    """Intervals between saves of a run, from its newest checkpoints not made by jobs."""

    run_id: int
    state: str
    """training: the next checkpoint is expected. stalled: overdue. ended: long overdue. unknown: fewer
    than three checkpoints."""
    last_at: datetime | None = None
    """When the newest checkpoint was committed."""
    interval_seconds: float | None = None
    """Median between the newest checkpoints."""
    expected_at: datetime | None = None
    """Expected time of the next checkpoint, for a run in training."""
    changes_at: datetime | None = None
    """Time at which the run counts as stalled or ended without another checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Runs side by side, in the requested order."""

    metric: str | None = None
    """Requested metric, or a loss."""
    metric_names: tuple[str, ...]
    """Facts of the newest checkpoints."""
    runs: tuple[ComparedRun, ...]
    facts: tuple[ComparedFact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDrift:
    """Changes of a run's tensors between steps, as a job found them. ``layers``: at most 512 rows,
    which cover all ``layer_count`` layers."""

    run_id: int
    job_id: int
    created_at: datetime
    steps: tuple[DriftStep, ...]
    """Neighbouring steps, the columns of `layers`."""
    layers: tuple[DriftLayer, ...]
    """At most 512 rows."""
    layer_count: int
    """Number of layers in all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetric:
    """Metric over the committed checkpoints of a run. ``last``: value of the highest step."""

    name: str
    count: int
    """Checkpoints with a finite value."""
    last: MetricPlace
    """Value of the highest step."""
    min: MetricPlace
    """Lowest value."""
    max: MetricPlace
    """Highest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Run with the requested metric, if present, and requested members of metadata."""

    run: Run
    metric: RunMetric | None = None
    """The requested metric; null: the run has no such metric."""
    metadata: Mapping[str, str]
    """Members in `show`, of the newest checkpoint; nested names joined by dots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """The checkpoints of a run with a step, in bins; ``metric_names`` are the metrics of the newest."""

    run_id: int
    count: int
    """Checkpoints with a step, within the requested steps."""
    metric_names: tuple[str, ...]
    """The metrics of the newest checkpoint with metrics."""
    bins: tuple[TimelineBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePhase:
    """Phase of a save, over all ranks with a record. ``within``: the enclosing phase."""

    name: str
    within: str | None = None
    """Enclosing phase."""
    is_blocking: bool
    """Training waited for the phase."""
    ranks: int
    """That recorded it."""
    min_seconds: float
    """Time of the fastest rank."""
    median_seconds: float
    max_seconds: float
    """Time of the slowest rank."""
    slowest_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePhases:
    """Seconds of the phases of a save, by rank; none where the writer recorded none."""

    rank_count: int
    """Ranks with recorded timings."""
    phases: tuple[SavePhase, ...]
    rows: tuple[PhaseRow, ...]
    blocking_seconds: float
    """Sum of the slowest ranks in phases that training waited for."""
    background_seconds: float
    """Sum of the slowest ranks in the other phases."""
    assemble_seconds: float | None = None
    """Of the coordinator, for the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    """A match. ``rank``: 0 equal, 1 prefix, 2 start of a word, 3 elsewhere."""

    kind: str
    """Plug-ins may find further kinds."""
    text: str
    """The matching name."""
    rank: int
    """0: equal; 1: prefix; 2: start of a word; 3: elsewhere."""
    root: str | None = None
    run: str | None = None
    """Key of the run."""
    run_id: int | None = None
    checkpoint_id: int | None = None
    """The matching checkpoint, or the newest with the tensor."""
    key: str | None = None
    """Key of the checkpoint."""
    step: int | None = None
    count: int
    """Checkpoints with the tag, or tensors whose names differ only by numbers."""
    href: str | None = None
    """The page of the object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A metric over the steps of a run; ``count`` checkpoints have a finite value."""

    run_id: int
    metric: str
    count: int
    """Checkpoints with a step and this metric."""
    points: tuple[SeriesPoint, ...]
    nonfinite_count: int = 0
    """Checkpoints with a step and a NaN or infinite value."""
    first_nonfinite_step: int | None = None
    """The first of these."""
    last_nonfinite_step: int | None = None
    """The last of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPoint:
    """``count`` neighbouring checkpoints of a run; ``checkpoint_id`` is one of them."""

    checkpoint_id: int
    """The id of one of these checkpoints."""
    first_step: int
    last_step: int
    last_at: datetime
    """Commit time of the newest checkpoint."""
    count: int
    """Number of neighbouring checkpoints."""
    min: float
    max: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap:
    """Map of shards: rows of files by rank, with bins of ``bin_bytes`` from ``begin``."""

    rank_count: int
    """Number of ranks with files."""
    file_count: int
    begin: int
    """First byte of the range in each file."""
    end: int
    """End of the range, exclusive."""
    bin_bytes: int
    """Bytes of a bin."""
    bins: int
    """Number of bins."""
    largest_rank: int | None = None
    """Rank with the most bytes of tensors."""
    largest_rank_bytes: int
    """Bytes of tensors of the largest rank."""
    mean_rank_bytes: float
    """Mean bytes of tensors of a rank."""
    rows: tuple[ShardMapRow, ...]
    names: tuple[str, ...]
    """Names of tensors, for `cell_names`."""
    name_bytes: tuple[int, ...]
    """By name: bytes stored by all ranks."""
    name_layers: tuple[int | None, ...]
    """By name: number of the layer, if any."""
    is_replicated: tuple[bool, ...]
    """By name: stored more than once."""
    dtypes: tuple[str, ...]
    """Dtypes, for `cell_dtypes`."""
    cell_rows: tuple[int, ...]
    """By cell that has bytes: index in `rows`."""
    cell_bins: tuple[int, ...]
    """By cell: number of the bin."""
    cell_bytes: tuple[int, ...]
    """By cell: bytes of tensors."""
    cell_chunks: tuple[int, ...]
    """By cell: number of boxes."""
    cell_names: tuple[int, ...]
    """Places in names: the tensor with the most bytes."""
    cell_dtypes: tuple[int, ...]
    """Index in dtypes of the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMapRow:
    """Files of adjacent ranks. ``rank`` None: files without a rank in their names."""

    first_rank: int | None = None
    """null: files without a rank in their names."""
    last_rank: int | None = None
    """null: files without a rank in their names."""
    file: str
    """The first of them."""
    files: int
    """Number of files."""
    file_bytes: int | None = None
    """null: not known."""
    tensor_bytes: int
    """Bytes of tensors."""
    largest_rank_bytes: int
    """Largest bytes of a rank."""
    replicated_bytes: int
    """Bytes of tensors stored more than once."""
    chunks: int
    """Of tensors, in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensor:
    """Tensor and its boxes; ``chunks`` are the first of ``chunk_count``."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunk_count: int
    """Number of boxes."""
    chunks: tuple[Chunk, ...]
    """The first 4,096 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage with its rule and the caller's rights."""

    name: str
    approvals: int
    """Approvals required for a promotion."""
    request_scope: str
    """Scope that may request a promotion, unless requesters are named."""
    requesters: tuple[str, ...]
    """Allowed requesters; empty: all callers with the scope."""
    approve_scope: str
    """Scope that may approve requests, unless approvers are named."""
    approvers: tuple[str, ...]
    """Allowed approvers; empty: all callers with the scope."""
    self_approval: bool
    """Requesters may approve their own requests."""
    requires_verified: bool
    """The last verification of the checkpoint must be good."""
    requires_previous: bool
    """Only from the stage before."""
    may_request: bool
    """Right of the caller."""
    may_approve: bool
    """Right of the caller; own requests may be excluded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntry:
    """A line of the history of a run."""

    id: int
    stage: str
    checkpoint_id: int
    checkpoint_key: str
    """Key of the checkpoint."""
    step: int | None = None
    request_id: int | None = None
    """The request of this entry; null: none."""
    action: str
    """replaced: another checkpoint took the stage. moved: the checkpoint went to another stage."""
    by: str
    """Account or key."""
    reason: str | None = None
    """Text given with the action."""
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHolder:
    """Checkpoint of a run in a stage."""

    stage: str
    checkpoint_id: int
    checkpoint_key: str
    """Key of the checkpoint."""
    step: int | None = None
    request_id: int
    """The request by which the checkpoint was promoted."""
    promoted_by: str
    promoted_at: datetime
    is_changed: bool
    """The content has changed since the promotion."""
    state: str
    verification: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """A request to promote a checkpoint to a stage."""

    id: int
    root: str
    run_id: int
    run: str
    """Key of the run."""
    checkpoint_id: int
    checkpoint_key: str
    """Key of the checkpoint."""
    step: int | None = None
    stage: str
    state: str
    """outdated: the checkpoint was changed or deleted. expired: too old."""
    reason: str | None = None
    """Text of the requester."""
    requested_by: str
    approved_by: tuple[str, ...]
    """Accounts and keys that approved."""
    is_changed: bool
    """The content has changed since the request."""
    created_at: datetime
    updated_at: datetime
    version: int
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of all tensors together, and of the tensors of this page."""

    is_stale: bool
    """The checkpoint was replaced since they were computed."""
    created_at: datetime
    job_id: int | None = None
    total: Any = None
    """Statistics of all tensors together."""
    tensor_count: int
    tensors: tuple[Any, ...]
    """Statistics of the tensors of this page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """Box of a tensor, and the position of its bytes."""

    fqn: str
    dtype: str
    rank: int | None = None
    """Rank in the name of the file; null: none."""
    file: str
    file_offset: int
    """Position of the first byte in the file."""
    bytes: int
    offsets: tuple[int, ...]
    """Start of the box in the tensor, by dimension."""
    sizes: tuple[int, ...]
    """Lengths of the box, by dimension."""
    copies: int | None = None
    """Copies of this box; null: too many chunks to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectUse:
    """Limits and use of an account, key, or root. ``quota_id``: stored limits, in place of the
    defaults."""

    kind: str
    subject: str
    """As in a quota: account#3 or key#3; the id of a key; the name of a root."""
    label: str
    """The name of the account or key."""
    quota_id: int | None = None
    """Stored limits, in place of the defaults; null: none."""
    limits: tuple[LimitUse, ...]
    warnings: tuple[str, ...]
    """Sentences about limits that are nearly or fully used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor, or another value (``kind`` "object", without dtype and shape)."""

    fqn: str
    """Name of the entry; nested keys are joined by dots."""
    kind: str
    """object: a value other than a tensor."""
    dtype: str | None = None
    """null: a value other than a tensor."""
    shape: tuple[int, ...] | None = None
    """null: a value other than a tensor."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes of tensors in older checkpoints of a run, which a drop would free."""

    run_id: int
    checkpoints: int
    """Number of committed checkpoints."""
    held: int
    """Of them, pinned or named by an alias; their bytes are not counted."""
    tensors: int
    """Matching tensors in all checkpoints."""
    bytes: int
    """Of these tensors."""
    total_bytes: int
    """Of all tensors of these checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGrid:
    """Matrix, or a two-dimensional slice, as ``rows`` times ``columns`` cells in row order."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """Of the slice, as a matrix."""
    rows: int
    """Number of rows of cells."""
    columns: int
    """Number of columns of cells."""
    is_sampled: bool
    """Only a part of each cell was read, because the tensor is large."""
    read_elements: int
    """Number of elements read."""
    mean: tuple[float | None, ...]
    """By cell, row by row; null: no finite value."""
    min: tuple[float | None, ...]
    max: tuple[float | None, ...]
    abs_max: tuple[float | None, ...]
    """By cell: maximum absolute value."""
    nonfinite: tuple[int, ...]
    """By cell: number of NaN or infinite elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Dtype and shape of a tensor on one side of a comparison."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBin:
    """Neighbouring checkpoints of a run by step, ``count`` in all states."""

    checkpoint_id: int
    """The last committed checkpoint, or else the last."""
    first_step: int
    last_step: int
    first_at: datetime
    """Commit time of the oldest checkpoint."""
    last_at: datetime
    """Commit time of the newest checkpoint."""
    count: int
    """Checkpoints in all states."""
    states: Mapping[str, int]
    """Checkpoints by state."""
    verifications: Mapping[str, int]
    """Committed checkpoints by verification."""
    pinned: int
    """Number of pinned checkpoints."""
    aliases: tuple[str, ...]
    """Aliases of the checkpoints."""
    bytes: BinValues | None = None
    """Sizes of committed checkpoints."""
    save_seconds: BinValues | None = None
    """Seconds of saves with timings: the slowest rank of each phase."""
    metrics: tuple[BinValues, ...]
    """Values of committed checkpoints, by metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """Sums of all entries below one name; ``entry`` if the name itself is an entry."""

    name: str
    """Prefix of the names below this node."""
    tensors: int
    """Number of tensors below."""
    objects: int
    """Number of other values below."""
    bytes: int
    """Size of all entries below."""
    entry: Tensor | None = None
    """Set if the name itself is a tensor or a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Use of the caller's account and key, and of visible roots."""

    account: SubjectUse
    key: SubjectUse | None = None
    """null: the caller has no key."""
    roots: tuple[SubjectUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDistance:
    """Differences between the values of a tensor. ``relative_l2``: L2 norm of the differences, divided
    by the norm of the earlier tensor."""

    elements: int
    """Elements of the tensor."""
    differing: int
    """Changed elements."""
    nonfinite: int
    """Of these, NaN or infinite on a side."""
    max_abs: float | None = None
    """Maximum difference; null for bits and without finite values."""
    relative_l2: float | None = None
    """The L2 norm of the differences divided by that of the tensor before; null if that is 0, and
    where nothing is finite."""
    nonfinite_after: int = 0
    """NaN or infinite in the tensor after, whether they differ or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Verification; ``is_current``: the content has not changed since."""

    id: int
    outcome: str
    """good or damaged."""
    mode: str
    """full: all bytes were read."""
    is_current: bool
    """The content has not changed since."""
    findings: Any = None
    """Findings with file, position and tensor; notes last."""
    checked_bytes: int
    """Bytes read."""
    seconds: float
    created_at: datetime
    job_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A URL to which events are posted; ``roots`` None: events of all roots."""

    id: int
    url: str
    events: tuple[str, ...]
    roots: tuple[str, ...] | None = None
    """null: all."""
    description: str
    is_enabled: bool
    disabled_reason: str | None = None
    """Reason why the service disabled the webhook."""
    failing_since: datetime | None = None
    """No delivery has succeeded since."""
    previous_secret_until: datetime | None = None
    """Until then the previous secret signs as well."""
    created_at: datetime
    updated_at: datetime
    etag: str
    """For If-Match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whoami:
    """The caller. ``scopes`` includes scopes implied by "admin"; ``roots`` None: all roots."""

    name: str
    key_id: int | None = None
    """null: the service needs no key."""
    scopes: tuple[str, ...]
    """All scopes, including implied ones."""
    roots: tuple[str, ...] | None = None
    """null: all."""
    expires_at: datetime | None = None
    """Of the key."""
    account_id: int | None = None
    """The account of the caller."""
    rights: Mapping[str, Any]
    """The scopes by root; `*` is all roots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDetail(Checkpoint):
    """A checkpoint with all known details. Fields of the structure are None if the structure is
    unknown."""

    save_id: str | None = None
    """Unique id that the writer gave the save; null: none recorded."""
    resumed_from: str | None = None
    """The save id of the checkpoint from which training resumed."""
    fingerprint: str | None = None
    """Fingerprint of the commit; it changes with the content."""
    content_digest: str | None = None
    """Digest of the names and digests of all tensors; null without a manifest or a verification."""
    user_metadata: Any = None
    """Metadata that the trainer passed to the save."""
    provenance: Any = None
    """Records of the writer: versions, ranks, and timings."""
    structure_digest: str | None = None
    """Digest of names, shapes and dtypes."""
    tensor_count: int | None = None
    object_count: int | None = None
    """Number of values other than tensors."""
    element_count: int | None = None
    """Elements of all tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedKey(Key):
    """A new key with its secret, which no later answer and no repr contains."""

    key: str = field(repr=False)
    """Shown only in this answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSecret(Webhook):
    """Webhook and its new secret, shown only once, and in no repr."""

    secret: str = field(repr=False)


class CheckpointQuery(TypedDict, total=False):
    """Options of GET /checkpoints."""

    root: str | None
    """Name of a root."""
    run_id: int | None
    """The `id` of a run."""
    run: str | None
    """Key of a run: its path in the root."""
    run_contains: str | None
    """Part of the key of the run."""
    run_glob: str | None
    """Glob for the key of the run."""
    min_step: int | None
    """Lowest step, inclusive."""
    max_step: int | None
    """Highest step, inclusive."""
    since: datetime | None
    """Commit time, inclusive."""
    until: datetime | None
    """Commit time, exclusive."""
    format: str | Sequence[str] | None
    """Formats of the files; any of them matches."""
    state: str | Sequence[str] | None
    """States; any of them matches. Default: committed."""
    verification: str | Sequence[str] | None
    """Results of the last verification; any of them matches."""
    tag: str | Sequence[str] | None
    """Tags; the checkpoint has all of them."""
    alias: str | None
    """Alias of the checkpoint, such as best."""
    metric: str | Sequence[str] | None
    """Comparisons such as loss<2.5."""
    dtype: str | None
    """The checkpoint has a tensor of this dtype, such as bfloat16."""
    tensor: str | None
    """The checkpoint has a tensor with this name or glob."""
    name_contains: str | None
    """Part of the name of the checkpoint."""
    name_glob: str | None
    """Glob for the name of the checkpoint; * matches any characters."""
    pinned: bool | None
    """true: only pinned; false: only without a pin."""
    registered_by: str | None
    """Account or key that registered the checkpoint, such as key:alice."""
    sort: str | None
    """time, step, bytes, name or metric:NAME; a minus means descending."""


class RegistrationOptions(TypedDict, total=False):
    """Options of POST /checkpoints."""

    root: str | None
    """Name of the root."""
    root_url: str | None
    """URL of the folder that contains the key, instead of `root`."""
    step: int | None
    """Training step."""
    save_id: str | None
    """Unique id of the save, to detect a replaced checkpoint."""
    tags: str | Sequence[str] | None
    """Tags to add."""
    metrics: Mapping[str, Any] | None
    """Metrics by name, to set."""
    deleted: bool | None
    """True: the trainer has deleted the checkpoint."""


class FacetQuery(TypedDict, total=False):
    """Options of GET /checkpoints/facets."""

    root: str | None
    """Name of a root."""
    run_id: int | None
    """The `id` of a run."""
    run: str | None
    """Key of a run: its path in the root."""
    run_contains: str | None
    """Part of the key of the run."""
    run_glob: str | None
    """Glob for the key of the run."""
    min_step: int | None
    """Lowest step, inclusive."""
    max_step: int | None
    """Highest step, inclusive."""
    since: datetime | None
    """Commit time, inclusive."""
    until: datetime | None
    """Commit time, exclusive."""
    format: str | Sequence[str] | None
    """Formats of the files; any of them matches."""
    state: str | Sequence[str] | None
    """States; any of them matches. Default: committed."""
    verification: str | Sequence[str] | None
    """Results of the last verification; any of them matches."""
    tag: str | Sequence[str] | None
    """Tags; the checkpoint has all of them."""
    alias: str | None
    """Alias of the checkpoint, such as best."""
    metric: str | Sequence[str] | None
    """Comparisons such as loss<2.5."""
    dtype: str | None
    """The checkpoint has a tensor of this dtype, such as bfloat16."""
    tensor: str | None
    """The checkpoint has a tensor with this name or glob."""
    name_contains: str | None
    """Part of the name of the checkpoint."""
    name_glob: str | None
    """Glob for the name of the checkpoint; * matches any characters."""
    pinned: bool | None
    """true: only pinned; false: only without a pin."""
    registered_by: str | None
    """Account or key that registered the checkpoint, such as key:alice."""
    values: int | None
    """Values of each filter at most."""


class LookupQuery(TypedDict, total=False):
    """Options of GET /checkpoints/lookup."""

    root: str | None
    """Name of a root."""
    key: str | None
    """Path of the checkpoint in its root."""
    run: str | None
    """Key of a run: its path in the root."""
    step: int | None
    """Step in the run."""
    alias: str | None
    """Alias in the run, such as best."""
    uri: str | None
    """Path or URL used by the trainer."""


class DiffQuery(TypedDict, total=False):
    """Options of GET /checkpoints/{checkpoint_id}/diff."""

    basis: str | None
    """values: as the job diff has found last, not found before that; else checksums where both have
    them in their indexes, else structure."""
    kind: str | Sequence[str] | None
    """All, if not given."""
    glob: str | None
    """Glob for names of tensors; * matches any characters."""
    order: str | None
    """The largest differences first; name: as they were saved; weights: by relative_l2, those of
    optimizers last."""


class DownloadQuery(TypedDict, total=False):
    """Options of GET /checkpoints/{checkpoint_id}/download."""

    format: str | None
    """torch is for torch.load(weights_only=True), unless numpy arrays or the like are among the
    values."""
    only: str | Sequence[str] | None
    """Globs of names."""
    exclude: str | Sequence[str] | None
    """Globs of names."""
    dtype: str | None
    """Cast floating-point tensors to this dtype."""
    drop_objects: bool | None
    """Leave out values unsupported by the format instead of an error."""


class PhasesQuery(TypedDict, total=False):
    """Options of GET /checkpoints/{checkpoint_id}/phases."""

    rows: int | None
    """As many rows of ranks at most."""
    first_rank: int | None
    """Of the rows; phases are over all ranks."""
    last_rank: int | None
    """Of the rows; phases are over all ranks."""


class StoredChunksQuery(TypedDict, total=False):
    """Options of GET /checkpoints/{checkpoint_id}/shards/chunks."""

    first_rank: int | None
    """Lowest rank whose files are included."""
    last_rank: int | None
    """Highest rank whose files are included."""
    begin: int | None
    """First byte of the range in each file."""
    end: int | None
    """End of the range, exclusive. Default: end of the longest file."""
    glob: str | None
    """Glob for names of tensors; * matches any characters."""


class ShardMapQuery(TypedDict, total=False):
    """Options of GET /checkpoints/{checkpoint_id}/shards/map."""

    first_rank: int | None
    """Lowest rank whose files are included."""
    last_rank: int | None
    """Highest rank whose files are included."""
    begin: int | None
    """First byte of the range in each file."""
    end: int | None
    """End of the range, exclusive. Default: end of the longest file."""
    glob: str | None
    """Glob for names of tensors; * matches any characters."""
    rows: int | None
    """Maximum rows of files."""
    bins: int | None
    """As many bins of bytes at most."""


class TensorQuery(TypedDict, total=False):
    """Options of GET /checkpoints/{checkpoint_id}/tensors."""

    glob: str | None
    """Glob for names of tensors; * matches any characters."""
    kind: str | None
    """object: values that are not tensors."""
    dtype: str | None
    """Dtype of the tensors."""


class LoadOptions(TypedDict, total=False):
    """Options of GET /checkpoints/{checkpoint_id}/will-it-load."""

    state_of: int | None
    """Of another checkpoint."""
    shapes_job: int | None
    """Found by a job of the kind shapes."""
    map: str | None
    """A ready weight map to load through."""
    inverse: bool | None
    """Reverse the mapping."""
    below: str | None
    """The prefix here of the names in the map's source."""


class JobQuery(TypedDict, total=False):
    """Options of GET /jobs."""

    state: str | Sequence[str] | None
    """States; any of them matches."""
    kind: str | Sequence[str] | None
    """Kinds, such as verify; any of them matches."""
    root: str | None
    """Name of a root."""
    checkpoint_id: int | None
    """The `id` of the checkpoint of the job."""
    created_by: str | None
    """Account or key that submitted the job, such as key:alice."""
    scans: bool | None
    """Include scheduled scans, one per minute."""


class PolicyOptions(TypedDict, total=False):
    """Options of POST /retention/policies."""

    run_glob: str | None
    """Matches keys of runs; `*` is any text."""
    grace_seconds: float | None
    """None: as the service is configured."""
    interval_seconds: float | None
    """Interval of the job."""
    is_enabled: bool | None
    """False: stored, but not applied."""


class PolicyChanges(TypedDict, total=False):
    """Options of PATCH /retention/policies/{policy_id}."""

    name: str | None
    run_glob: str | None
    keep: Mapping[str, Any] | None
    grace_seconds: float | None
    """Time in which a deleted checkpoint can be restored."""
    interval_seconds: float | None
    """Time between two applications."""
    is_enabled: bool | None


class RuleOptions(TypedDict, total=False):
    """Options of POST /rules."""

    event: str | None
    condition: Mapping[str, Any] | None
    is_enabled: bool | None


class RuleChanges(TypedDict, total=False):
    """Options of PATCH /rules/{rule_id}."""

    name: str | None
    event: str | None
    condition: Mapping[str, Any] | None
    actions: Sequence[Mapping[str, Any]] | None
    is_enabled: bool | None


class RunQuery(TypedDict, total=False):
    """Options of GET /runs."""

    root: str | None
    """Name of a root."""
    contains: str | None
    """Part of the key."""
    glob: str | None
    """Glob for the key; * matches any characters."""
    sort: str | None
    """latest: time of the newest checkpoint. A minus means descending."""


class ComparisonQuery(TypedDict, total=False):
    """Options of GET /runs/compare."""

    metric: str | None
    """Name of a metric; default: a loss."""
    points: int | None
    """Maximum points of each run."""


class RunListQuery(TypedDict, total=False):
    """Options of GET /runs/summaries."""

    root: str | None
    """Name of a root."""
    contains: str | None
    """Part of the key."""
    glob: str | None
    """Glob for the key; * matches any characters."""
    metadata: str | Sequence[str] | None
    """Comparisons with metadata of the newest checkpoint, such as optimizer.lr<0.01."""
    has_metric: str | Sequence[str] | None
    """Metrics; the run has all of them."""
    metric: str | None
    """Metric to show and to sort by."""
    of: str | None
    """The value of the metric to sort by; last is of the highest step."""
    sort: str | None
    """With a minus the greatest first. By metric, runs without it are left out."""
    show: str | Sequence[str] | None
    """Members of metadata."""


class TimelineQuery(TypedDict, total=False):
    """Options of GET /runs/{run_id}/timeline."""

    metric: str | Sequence[str] | None
    """Names of metrics to include."""
    points: int | None
    """Maximum bins."""
    min_step: int | None
    """Lowest step, inclusive."""
    max_step: int | None
    """Highest step, inclusive."""


class WebhookOptions(TypedDict, total=False):
    """Options of POST /webhooks."""

    events: str | Sequence[str] | None
    """Kinds of events to post; default: all."""
    roots: str | Sequence[str] | None
    """Names of roots; null: all."""
    description: str | None
    """Text for admins."""
    is_enabled: bool | None
    """False: events are not posted."""
    secret: str | None
    """Secret for signatures: whsec_ and base64; default: a new one."""


class WebhookChanges(TypedDict, total=False):
    """Options of PATCH /webhooks/{webhook_id}."""

    url: str
    events: str | Sequence[str]
    """Kinds of events to post."""
    roots: str | Sequence[str] | None
    """Names of roots; null: all."""
    description: str
    is_enabled: bool
    """False: events are not posted."""
