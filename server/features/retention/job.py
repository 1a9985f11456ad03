"""The job ``retention``: applies a policy to all its runs, and its submission at the policy's interval.

Checkpoints are deleted with the policy's grace; parts that are dropped cannot be restored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

from sqlalchemy import Connection, Row, func, select, update

from dcp.manager.retention import Retention
from dcp.server.catalog.errors import CatalogError
from dcp.server.catalog.labels import Change
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
from dcp.server.core.security.principal import SYSTEM, Principal
from dcp.server.core.settings import Settings
from dcp.server.database.sql import insert_missing
from dcp.server.database.tables import checkpoints, jobs, schedules
from dcp.server.features.retention.deletion import delete_softly
from dcp.server.features.retention.planning import plan_run, runs_of
from dcp.server.features.retention.policies import POLICIES, writable_roots
from dcp.server.features.retention.prune import PruneParams, in_use, prune_spec
from dcp.server.records.administration import RetentionDecision, Scope

__all__ = ["RetentionKind", "RetentionParams", "is_policy_due", "submit_policies"]

Policy = Row[Any]

_RUNS: Final = 100
_MAX_LISTED: Final = 200
_TRIED_AGAIN_SECONDS: Final = 86_400.0
"""A part that could not be dropped is tried again after this time."""

_COUNTED: Final = ("runs", "kept", "deleted", "bytes", "dropped", "dropped_bytes")


class RetentionParams(Parameters):
    """The policy; a dry run deletes nothing."""

    policy_id: CheckpointId
    dry_run: bool = False


def _spec(policy: Policy, created_by: str, *, dry_run: bool = False) -> JobSpec:
    """Make the job; a policy has one at a time."""
    return JobSpec(
        kind="retention",
        params={"policy_id": policy.id, "dry_run": dry_run},
        created_by=created_by,
        root=policy.root,
        dedup_key=f"retention:{policy.id}:{'dry' if dry_run else 'real'}",
    )


class RetentionKind(Kind[RetentionParams]):
    """The application of a policy: a task for a hundred runs, a transaction for each run."""

    name: ClassVar[str] = "retention"
    scope: ClassVar[Scope] = "delete"
    params = RetentionParams
    needs_database: ClassVar[bool] = True

    def specify(
        self, connection: Connection, params: RetentionParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        policy = POLICIES.find(connection, params.policy_id, caller.roots)
        if policy.root not in writable_roots(settings) and not params.dry_run:
            raise ForbiddenError(f"root {policy.root} is read-only")
        return _spec(policy, caller.name, dry_run=params.dry_run)

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
    """Apply the policy to one run. Returns counts, ``keys`` of what is deleted, and sentences on rules that
    cannot be applied."""
    policy, now = _policy(connection, payload["policy_id"]), time.time()
    if policy.version != payload["version"]:
        raise PermanentJobError(f"retention policy {policy.name} was changed meanwhile")
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
    """Submit jobs that drop parts, one a checkpoint; not for checkpoints that another job uses, which are for
    the next time, nor where it failed lately. Returns the checkpoints that lose something."""
    numbers = [one.checkpoint_id for one in wanted]
    busy, tried = in_use(connection, numbers), _tried(connection, numbers, policy, now)
    begun = []
    for one in wanted:
        params = PruneParams(checkpoint_id=one.checkpoint_id, parts=one.drops)
        if one.checkpoint_id in busy or params.parts in tried.get(one.checkpoint_id, ()):
            continue
        subject = find_subject(connection, one.checkpoint_id)
        submit(connection, prune_spec(subject, params, _actor(policy)), now)
        begun.append(one)
    return begun


def _tried(
    connection: Connection, numbers: Sequence[int], policy: Policy, now: float
) -> dict[int, list[tuple[str, ...]]]:
    """Return by checkpoint the parts that jobs of the policy should have dropped and, as they are still
    there, have not: they failed, or found it pinned in its folder. Jobs from before the last change of the
    policy or the checkpoint, or older than a day, do not count."""
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
    """Find out whether `submit_policies` has anything to do."""
    names = [_schedule(policy) for policy in _active(connection, context)]
    query = select(func.count()).where(schedules.c.name.in_(names), schedules.c.due_seconds > context.now)
    return bool(names) and connection.execute(query).scalar_one() < len(names)


def submit_policies(context: ScheduleContext) -> None:
    """Submit the jobs of policies whose interval is over."""
    context.database.transact(lambda connection: _submit(connection, context))


def _submit(connection: Connection, context: ScheduleContext) -> None:
    for policy in _active(connection, context):
        insert_missing(connection, schedules, [{"name": _schedule(policy), "due_seconds": context.now}])
        is_due = schedules.c.name == _schedule(policy), schedules.c.due_seconds <= context.now
        later = {"due_seconds": context.now + policy.interval_seconds}
        if connection.execute(update(schedules).where(*is_due).values(later)).rowcount == 1:
            submit_or_join(connection, _spec(policy, SYSTEM.name), context.now)


def _active(connection: Connection, context: ScheduleContext) -> list[Policy]:
    writable = writable_roots(context.settings)
    return [one for one in POLICIES.rows(connection, is_enabled=True) if one.root in writable]


def _schedule(policy: Policy) -> str:
    return f"retention:{policy.id}"
