"""Retention policies: requests, storage, and the job that applies a policy at its interval.

The job ``retention`` applies a policy to all its runs. Checkpoints are deleted with the policy's grace
period; dropped parts cannot be restored.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Row,
    String,
    delete,
    func,
    select,
    true,
    update,
)
from sqlalchemy import Text as LongText

from dcp.manager.retention import Retention
from dcp.server.catalog import audit
from dcp.server.catalog.errors import CatalogError, InvalidQueryError
from dcp.server.catalog.inputs import Finite, Name, Request, Text
from dcp.server.catalog.labels import Change
from dcp.server.catalog.names import check_pattern
from dcp.server.core.jobs.kind import (
    CheckpointId,
    JobContext,
    JobPlan,
    Kind,
    Parameters,
    PermanentJobError,
    ReportProgress,
)
from dcp.server.core.jobs.ledger.rows import JobSpec, Json, TaskSpec
from dcp.server.core.jobs.ledger.transitions import submit, submit_or_join
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.jobs.subjects import find_subject, open_database
from dcp.server.core.problems import ForbiddenError
from dcp.server.core.resource import Resource
from dcp.server.core.security.accounts import without_scope
from dcp.server.core.security.principal import SYSTEM, Principal
from dcp.server.core.settings import Settings
from dcp.server.database.engine import insert_missing
from dcp.server.database.mapping import ID, JSON_DOCUMENT, record_of_row
from dcp.server.database.tables import checkpoints, jobs, resource_table, roots, schedules
from dcp.server.features import role_settings
from dcp.server.features.retention.deletion import PruneKind, PruneParams, delete_softly, in_use
from dcp.server.features.retention.planning import RetentionDecision, plan_run, runs_of
from dcp.server.records.administration import Scope
from dcp.server.records.declaring import Shown

retention_policies: Final = resource_table(
    "retention_policies",
    Column("name", String(128), nullable=False, unique=True),
    Column("is_enabled", Boolean, nullable=False, server_default=true()),
    Column("root_id", ID, ForeignKey("roots.id"), nullable=False),
    Column("run_glob", LongText, nullable=False),
    Column("keep", JSON_DOCUMENT, nullable=False),  # the fields of `dcp.Retention`
    Column("grace_seconds", Float, nullable=False),
    Column("interval_seconds", Float, nullable=False),
    Column("maker", String(256)),  # `Principal.answerable` of the last caller to change the policy
)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """A retention policy for some runs; ``keep`` as in `dcp.Retention`."""

    id: int
    name: str
    root: str
    run_glob: Annotated[str, Shown("Glob for the keys of the runs.")]
    keep: Annotated[Mapping[str, Any], Shown("As in the request.")]
    grace_seconds: Annotated[float, Shown("Time in which a deleted checkpoint can be restored.")]
    interval_seconds: Annotated[float, Shown("Time between two applications of the policy.")]
    is_enabled: bool
    version: int
    created: datetime
    updated: datetime
    etag: Annotated[str, Shown("For If-Match.")]


POLICIES: Final = Resource(
    retention_policies,
    what="retention policy",
    noun="retention",
    tag="p{id}",
    record=lambda row, etag: record_of_row(RetentionPolicy, row, etag=etag),
    detail=lambda row: {"name": row.name, "root": row.root, "run_glob": row.run_glob, "keep": row.keep},
    query=select(retention_policies, roots.c.name.label("root")).join(
        roots, roots.c.id == retention_policies.c.root_id
    ),
    is_visible=lambda row, visible: visible is None or row.root in visible,
    root=lambda row: row.root,
    forget=lambda connection, number: connection.execute(
        delete(schedules).where(schedules.c.name == f"retention:{number}")
    ),
)


def _checked_glob(glob: str) -> str:
    try:
        return check_pattern("parts", glob)
    except InvalidQueryError as error:
        raise ValueError(str(error)) from error


_DAY: float = 86_400.0
_Count = Annotated[int, Field(ge=1, le=2**53 - 1)]
_Grace = Annotated[
    Finite, Field(ge=0, le=3660 * _DAY, description="How long deleted checkpoints can be restored.")
]
_Interval = Annotated[Finite, Field(ge=60, le=366 * _DAY, description="Interval of the job.")]
_RootName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
_PartGlob = Annotated[Text, Field(min_length=1, max_length=250), AfterValidator(_checked_glob)]
_Glob = Annotated[
    Text, Field(min_length=1, max_length=256, description="Matches keys of runs; `*` is any text.")
]


class KeepBest(Request):
    """The ``count`` best steps by a metric."""

    metric: Name = Field(description="Name of the metric.")
    count: _Count = Field(default=1, description="Number of best steps to keep.")
    mode: Literal["min", "max"] = Field(default="min", description="min: lower values are better.")


class KeepPart(Request):
    """Steps that keep a part, such as the optimizer. Each rule keeps steps; at least one rule is required."""

    last: _Count | None = Field(default=None, description="The newest n.")
    every_steps: _Count | None = Field(default=None, description="Multiples of this step.")
    best: list[KeepBest] | None = Field(
        default=None, min_length=1, max_length=16, description="The best steps by a metric."
    )
    younger_than_seconds: Annotated[Finite, Field(gt=0)] | None = Field(
        default=None, description="Steps committed within this time."
    )


class Keep(KeepPart):
    """Steps to keep. Each rule keeps steps; without rules for steps, rules for parts are required and all
    steps are kept. The newest good step is always kept whole."""

    optimizer: KeepPart | None = Field(
        default=None, description="Steps that keep their optimizer; other steps keep the remaining parts."
    )
    parts: dict[_PartGlob, KeepPart] | None = Field(
        default=None, min_length=1, max_length=16, description="The same by globs on names of entries."
    )

    @model_validator(mode="after")
    def _keeps(self) -> Self:
        Retention.from_dict(self.document())
        return self

    def document(self) -> dict[str, Any]:
        """Return the given members for storage."""
        return self.model_dump(exclude_none=True)


class PreviewRequest(Request):
    """A policy to preview."""

    root: _RootName = Field(description="Name of the root.")
    run_glob: _Glob = "*"
    keep: Keep = Field(description="Steps to keep.")


class PolicyRequest(PreviewRequest):
    """A new policy."""

    name: Name = Field(description="Unique name of the policy.")
    grace_seconds: _Grace | None = Field(default=None, description="None: as the service is configured.")
    interval_seconds: _Interval = 3600.0
    is_enabled: bool = Field(default=True, description="False: stored, but not applied.")


class PolicyChange(Request):
    """The fields to change."""

    name: Name | None = None
    run_glob: _Glob | None = None
    keep: Keep | None = None
    grace_seconds: _Grace | None = Field(
        default=None, description="Time in which a deleted checkpoint can be restored."
    )
    interval_seconds: _Interval | None = Field(default=None, description="Time between two applications.")
    is_enabled: bool | None = None


# -- the job ``retention`` -----------------------------------------------------------------------------------


Policy = Row[Any]

_RUNS: Final = 100
_MAX_LISTED: Final = 200
_TRIED_AGAIN_SECONDS: Final = 86_400.0
"""Retry interval of a failed drop of a part."""

_NO_SCOPE: Final = "the account that made it no longer has the scope 'delete' in its root"
"""Reason for disabling a policy; a caller with this scope may enable it."""

_COUNTED: Final = ("runs", "kept", "deleted", "bytes", "dropped", "dropped_bytes")


class RetentionParams(Parameters):
    """The policy; a dry run deletes nothing."""

    policy_id: CheckpointId = Field(description="The `id` of the policy.")
    dry_run: bool = Field(default=False, description="Count only; delete nothing.")


class RetentionKind(Kind[RetentionParams]):
    """The application of a policy: a task for a hundred runs, a transaction for each run."""

    name: ClassVar[str] = "retention"
    about: ClassVar[str] = "Apply a retention policy to its runs."
    scope: ClassVar[Scope] = "delete"
    params = RetentionParams
    needs_database: ClassVar[bool] = True

    @classmethod
    def dedup_key(cls, params: RetentionParams) -> str:
        """As `Kind.dedup_key`: one per policy at a time."""
        return f"retention:{params.policy_id}:{'dry' if params.dry_run else 'real'}"

    def specify(
        self, connection: Connection, params: RetentionParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        policy = POLICIES.find(connection, params.policy_id, caller.roots)
        if policy.root not in settings.writable_roots and not params.dry_run:
            raise ForbiddenError(f"root {policy.root} is read-only")
        return self.new_job(params, caller.name, root=policy.root)

    def plan(self, context: JobContext, params: RetentionParams) -> JobPlan:
        """As `Kind.plan`."""
        with open_database(context) as database, database.read() as connection:
            policy = _policy(connection, params.policy_id)
            found = runs_of(connection, policy.root, policy.run_glob)
        shared = {"policy_id": policy.id, "version": policy.version, "dry_run": params.dry_run}
        batches = [found[start : start + _RUNS] for start in range(0, len(found), _RUNS)]
        return JobPlan(
            tasks=[TaskSpec(payload={"runs": some}) for some in batches], plan_data={"shared": shared}
        )

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`."""
        found = []
        with open_database(context) as database:
            for run_id, run in payload["runs"]:
                apply = partial(_apply, payload=payload, run_id=run_id, run=run)
                if payload["dry_run"]:
                    with database.read() as connection:
                        found.append(apply(connection))
                else:
                    found.append(database.transact(apply))
        return _added(found)

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        shared = plan_data["shared"]
        return {"policy_id": shared["policy_id"], "dry_run": shared["dry_run"], **_added(results)}


def _added(results: Sequence[Json]) -> dict[str, Any]:
    """Add up results of `_apply`."""
    sums = {name: sum(one[name] for one in results) for name in _COUNTED}
    lists = {
        name: [each for one in results for each in one[name]][:_MAX_LISTED] for name in ("keys", "unjudged")
    }
    return {**sums, **lists}


def _policy(connection: Connection, policy_id: int) -> Policy:
    try:
        policy = POLICIES.find(connection, policy_id)
    except CatalogError as error:
        raise PermanentJobError(str(error)) from error
    if not policy.is_enabled:
        raise PermanentJobError(f"retention policy {policy.name} is disabled")
    return policy


def _apply(connection: Connection, payload: Json, run_id: int, run: str) -> dict[str, Any]:
    """Apply the policy to one run. Returns counts, ``keys`` of deleted checkpoints, and sentences on
    inapplicable rules."""
    policy, now = _policy(connection, payload["policy_id"]), time.time()
    if policy.version != payload["version"]:
        raise PermanentJobError(f"retention policy {policy.name} was changed during the job")
    found = plan_run(connection, run_id, run, Retention.from_dict(policy.keep), now)
    change = Change(actor=_actor(policy), now=now)
    kept, gone = len(found.decisions) - len(found.deleted), []
    for one in found.deleted:
        try:
            if not payload["dry_run"]:
                delete_softly(connection, one.checkpoint_id, policy.grace_seconds, change)
        except CatalogError:  # pinned or given an alias since
            kept += 1
            continue
        gone.append(one)
    losing = found.dropped if payload["dry_run"] else _drop(connection, found.dropped, policy, now)
    return {
        "runs": 1,
        "kept": kept,
        "deleted": len(gone),
        "bytes": sum(one.bytes for one in gone),
        "dropped": len(losing),
        "dropped_bytes": sum(one.dropped_bytes for one in losing),
        "keys": [one.key for one in gone],
        "unjudged": [f"{run or 'the root'}: {sentence}" for sentence in found.unjudged],
    }


def _drop(
    connection: Connection, wanted: Sequence[RetentionDecision], policy: Policy, now: float
) -> list[RetentionDecision]:
    """Submit jobs that drop parts, one per checkpoint. Skips checkpoints in use by other jobs, and recent
    failures. Returns the checkpoints that lose parts."""
    numbers = [one.checkpoint_id for one in wanted]
    busy, tried = in_use(connection, numbers), _tried(connection, numbers, policy, now)
    begun = []
    for one in wanted:
        params = PruneParams(checkpoint_id=one.checkpoint_id, parts=one.drops)
        if one.checkpoint_id in busy or params.parts in tried.get(one.checkpoint_id, ()):
            continue
        subject = find_subject(connection, one.checkpoint_id)
        submit(connection, PruneKind.of_subject(subject, params, _actor(policy)), now)
        begun.append(one)
    return begun


def _tried(
    connection: Connection, numbers: Sequence[int], policy: Policy, now: float
) -> dict[int, list[tuple[str, ...]]]:
    """Return parts by checkpoint that jobs of the policy failed to drop, or found pinned in storage. Ignores
    jobs before the last change of the policy or checkpoint, and jobs older than a day."""
    since = max(policy.updated_seconds, now - _TRIED_AGAIN_SECONDS)
    query = (
        select(jobs.c.checkpoint_id, jobs.c.params)
        .join(checkpoints, checkpoints.c.id == jobs.c.checkpoint_id)
        .where(jobs.c.kind == "prune", jobs.c.created_by == _actor(policy), jobs.c.checkpoint_id.in_(numbers))
        .where(jobs.c.created_seconds >= since, jobs.c.created_seconds >= checkpoints.c.committed_seconds)
        .where(jobs.c.finished_seconds.is_not(None))
    )
    found: dict[int, list[tuple[str, ...]]] = {}
    for number, params in connection.execute(query):
        found.setdefault(number, []).append(PruneParams.model_validate(params).parts)
    return found


def _actor(policy: Policy) -> str:
    return f"retention:{policy.name}"


# -- at the policy's interval --------------------------------------------------------------------------------


def is_policy_due(connection: Connection, context: ScheduleContext) -> bool:
    """Return True if `submit_policies` has work."""
    names = [_schedule(policy) for policy in _active(connection, context)]
    query = select(func.count()).where(schedules.c.name.in_(names), schedules.c.due_seconds > context.now)
    return bool(names) and connection.execute(query).scalar_one() < len(names)


def submit_policies(context: ScheduleContext) -> None:
    """Submit jobs for policies with an elapsed interval."""
    context.database.transact(lambda connection: _submit(connection, context))


def _submit(connection: Connection, context: ScheduleContext) -> None:
    policies, roles = _active(connection, context), role_settings(context.settings)
    for policy in without_scope(connection, policies, lambda policy: [policy.root], roles, "delete"):
        policies.remove(policy)
        _disable(connection, policy, context.now)
    for policy in policies:
        insert_missing(connection, schedules, [{"name": _schedule(policy), "due_seconds": context.now}])
        is_due = schedules.c.name == _schedule(policy), schedules.c.due_seconds <= context.now
        later = {"due_seconds": context.now + policy.interval_seconds}
        if connection.execute(update(schedules).where(*is_due).values(later)).rowcount == 1:
            spec = RetentionKind.new_job(RetentionParams(policy_id=policy.id), SYSTEM.name, root=policy.root)
            submit_or_join(connection, spec, context.now)


def _disable(connection: Connection, policy: Policy, now: float) -> None:
    values = {"is_enabled": False, "version": policy.version + 1, "updated_seconds": now}
    table = POLICIES.table.c
    unchanged = update(POLICIES.table).where(table.id == policy.id, table.version == policy.version)
    if not connection.execute(unchanged.values(values)).rowcount:  # changed meanwhile, by another maker
        return
    detail = {"name": policy.name, "reason": _NO_SCOPE}
    about = "retention.disable", f"retention:{policy.id}", detail
    audit.record(connection, SYSTEM.name, *about, now=now, root=policy.root)


def _active(connection: Connection, context: ScheduleContext) -> list[Policy]:
    writable = context.settings.writable_roots
    return [one for one in POLICIES.rows(connection, is_enabled=True) if one.root in writable]


def _schedule(policy: Policy) -> str:
    return f"retention:{policy.id}"
