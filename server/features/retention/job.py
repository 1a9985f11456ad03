"""``retention``: a policy is applied to all its runs; what goes is deleted with the policy's grace, and parts
of what stays are dropped, which nothing brings back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from sqlalchemy import Connection, select

from dcp.server.catalog.errors import CatalogError
from dcp.server.catalog.labels import Change
from dcp.server.core.jobs.kind import JobContext, JobPlan, Kind, PermanentJobError, ReportProgress, TaskSpec
from dcp.server.core.jobs.ledger.states import JobSpec, Json
from dcp.server.core.jobs.ledger.transitions import submit
from dcp.server.core.jobs.parameters import CheckpointId, Parameters
from dcp.server.core.jobs.subjects import find_subject, open_database
from dcp.server.core.problems import ForbiddenError
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings
from dcp.server.database.tables import checkpoints, jobs
from dcp.server.features.retention.deletion import delete_softly
from dcp.server.features.retention.parts import in_use
from dcp.server.features.retention.planning import plan_run, runs_of
from dcp.server.features.retention.policies import PolicyRow, get_policy
from dcp.server.features.retention.prune import PruneParams, prune_spec
from dcp.server.records.administration import RetentionDecision

__all__ = ["RetentionKind", "RetentionParams", "retention_spec"]

_RUNS: Final = 100
_MAX_LISTED: Final = 200
_TRIED_AGAIN_SECONDS: Final = 86_400.0
"""A part that could not be dropped is tried again then: what was in the way may be gone."""

_COUNTED: Final = ("runs", "kept", "deleted", "bytes", "dropped", "dropped_bytes")


class RetentionParams(Parameters):
    """The policy; a dry run deletes nothing."""

    policy_id: CheckpointId
    dry_run: bool = False


def retention_spec(policy: PolicyRow, *, created_by: str, dry_run: bool = False) -> JobSpec:
    """The job; there is one of a policy at a time."""
    return JobSpec(
        kind="retention",
        params={"policy_id": policy.id, "dry_run": dry_run},
        created_by=created_by,
        root=policy.root,
        dedup_key=f"retention:{policy.id}:{'dry' if dry_run else 'real'}",
    )


class RetentionKind(Kind[RetentionParams]):
    """A task for some runs, a transaction for each."""

    name: ClassVar[str] = "retention"
    scope: ClassVar[Scope] = "delete"
    params = RetentionParams
    needs_database: ClassVar[bool] = True

    def specify(
        self, connection: Connection, params: RetentionParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        policy = get_policy(connection, params.policy_id, caller.roots)
        is_readonly = policy.root not in settings.roots or settings.roots[policy.root].readonly
        if is_readonly and not params.dry_run:
            raise ForbiddenError(f"root {policy.root} is read-only")
        return retention_spec(policy, created_by=caller.name, dry_run=params.dry_run)

    def plan(self, context: JobContext, params: RetentionParams) -> JobPlan:
        """As `Kind.plan`."""
        with open_database(context) as database, database.read() as connection:
            policy = _policy(connection, params.policy_id)
            found = runs_of(connection, policy.root, policy.run_glob)
        shared = {"policy_id": policy.id, "version": policy.version, "dry_run": params.dry_run}
        return JobPlan(
            tasks=[TaskSpec(payload={"runs": list(some)}) for some in _batches(found)],
            plan_data={"shared": shared},
        )

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`."""
        totals: dict[str, Any] = dict.fromkeys(_COUNTED, 0) | {"keys": [], "unjudged": []}
        with open_database(context) as database:
            for run_id, run in payload["runs"]:
                if payload["dry_run"]:
                    with database.read() as connection:
                        found = _apply(connection, payload, run_id, run)
                else:
                    found = database.transact(
                        lambda connection, run_id=run_id, run=run: _apply(  # type: ignore[misc]
                            connection, payload, run_id, run
                        )
                    )
                for name in _COUNTED:
                    totals[name] += found[name]
                for name in ("keys", "unjudged"):
                    totals[name] = (totals[name] + found[name])[:_MAX_LISTED]
        return totals

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        sums = {name: sum(one.get(name, 0) for one in results) for name in _COUNTED}
        lists = {
            name: [each for one in results for each in one.get(name, ())][:_MAX_LISTED]
            for name in ("keys", "unjudged")
        }
        shared = plan_data["shared"]
        return {"policy_id": shared["policy_id"], "dry_run": shared["dry_run"], **sums, **lists}


def _batches(found: Sequence[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    return [list(found[start : start + _RUNS]) for start in range(0, len(found), _RUNS)]


def _policy(connection: Connection, policy_id: int) -> PolicyRow:
    try:
        policy = get_policy(connection, policy_id)
    except CatalogError as error:
        raise PermanentJobError(str(error)) from error
    if not policy.is_enabled:
        raise PermanentJobError(f"retention policy {policy.name} is disabled")
    return policy


def _apply(connection: Connection, payload: Json, run_id: int, run: str) -> dict[str, Any]:
    """What becomes of one run: what is counted, ``keys`` of those that go, and what could not be judged."""
    policy, now = _policy(connection, payload["policy_id"]), time.time()
    if policy.version != payload["version"]:
        raise PermanentJobError(f"retention policy {policy.name} was changed meanwhile")
    found = plan_run(connection, run_id, run, policy.retention, now)
    change = Change(actor=_actor(policy), now=now)
    kept, gone = len(found.decisions) - len(found.deleted), []
    for one in found.deleted:
        try:
            if not payload["dry_run"]:
                delete_softly(connection, one.checkpoint_id, policy.grace_seconds, change)
        except CatalogError:  # pinned or named in this instant
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
    connection: Connection, wanted: Sequence[RetentionDecision], policy: PolicyRow, now: float
) -> list[RetentionDecision]:
    """Have parts dropped from checkpoints that stay, by a job each; not from those that another job is about,
    which the next round sees to, nor where it was in vain. Returns those that lose something."""
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
    connection: Connection, numbers: Sequence[int], policy: PolicyRow, now: float
) -> dict[int, list[tuple[str, ...]]]:
    """By checkpoint what jobs of the policy were to drop and, as it is still there, have not: they failed, or
    found it pinned in its folder. Not from before the policy or the checkpoint was changed, or a day ago."""
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


def _actor(policy: PolicyRow) -> str:
    return f"retention:{policy.name}"
