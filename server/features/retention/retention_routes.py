"""Retention by the API and on the pages of checkpoints and runs: policies, previews, deletion, restoring."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import Query as InQuery
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from dcp.manager.retention import Retention
from dcp.server.catalog.audit import last_removal
from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.inputs import Name, Query, Step, Text
from dcp.server.catalog.names import check_pattern
from dcp.server.catalog.runs import root_id
from dcp.server.core.allowances import keeping
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import IfMatch, PageParams, PageQuery, Precondition, check_visible
from dcp.server.core.problems import ForbiddenError, NotFoundError
from dcp.server.features.retention import deletion, feature
from dcp.server.features.retention.planning import (
    RetentionPreview,
    RetentionTotals,
    TensorBytes,
    plan_run,
    retention_totals,
    runs_of,
    tensor_bytes,
)
from dcp.server.features.retention.policies import (
    POLICIES,
    Keep,
    PolicyChange,
    PolicyRequest,
    PreviewRequest,
    RetentionKind,
    RetentionParams,
    RetentionPolicy,
)
from dcp.server.records.checkpoints import CheckpointDetail, Run
from dcp.server.records.jobs import Job
from dcp.server.records.lists import Page
from dcp.steps import OPTIMIZER

_MAX_GRACE_SECONDS: Final = 3660 * 86_400.0
_MAX_RUNS: Final = 50
_MAX_PLANNED: Final = 5_000
"""Checkpoints per page of previews; a larger run has its own page."""

_POLICY: Final = "/retention/policies/{policy_id}"


@feature.post("/retention/policies", tag="retention", scope="delete", status=201, errors=(404, 409))
def create_retention_policy(body: PolicyRequest, ask: Ask) -> RetentionPolicy:
    """Create a policy, applied immediately and then at its interval. Preview the policy first."""
    check_visible(ask.caller, body.root)
    if body.root not in ask.settings.roots:
        raise NotFoundError(f"root {body.root!r} not found")
    if body.root not in ask.settings.writable_roots:
        raise ForbiddenError(f"root {body.root} is read-only")
    check_pattern("run_glob", body.run_glob)
    values = body.model_dump(exclude={"root", "keep"}) | {
        "root_id": ask.find(root_id, body.root),
        "keep": body.keep.document(),
        "maker": ask.caller.answerable,
    }
    if body.grace_seconds is None:
        values["grace_seconds"] = ask.settings.delete_grace_seconds
    return POLICIES.create(ask, values)


@feature.get("/retention/policies", tag="retention", errors=())
def list_retention_policies(ask: Ask, page: PageQuery) -> Page[RetentionPolicy]:
    """List the policies of visible roots by id."""
    return POLICIES.page(ask, page)


@feature.post("/retention/preview", tag="retention", scope="read")
def preview_retention(body: PreviewRequest, ask: Ask, page: PageQuery) -> Page[RetentionPreview]:
    """Preview a policy run by run; nothing is changed."""
    keep = _tried(body, ask)
    return _preview(ask, page, body.root, body.run_glob, keep)


@feature.post("/retention/preview/totals", tag="retention", scope="read")
def preview_retention_totals(body: PreviewRequest, ask: Ask) -> RetentionTotals:
    """Preview the totals of a policy: kept, deleted, and freed. Changes nothing."""
    keep = _tried(body, ask)
    return ask.find(retention_totals, body.root, body.run_glob, keep, ask.now)


@feature.get(_POLICY, tag="retention")
def get_retention_policy(policy_id: IdPath, ask: Ask) -> RetentionPolicy:
    """Get a policy."""
    return POLICIES.read(ask, policy_id)


@feature.get(_POLICY + "/preview", tag="retention")
def preview_retention_policy(policy_id: IdPath, ask: Ask, page: PageQuery) -> Page[RetentionPreview]:
    """Preview a policy run by run; nothing is changed."""
    policy = ask.find(POLICIES.find, policy_id, ask.visible)
    return _preview(ask, page, policy.root, policy.run_glob, Retention.from_dict(policy.keep))


@feature.get(_POLICY + "/preview/totals", tag="retention")
def preview_retention_policy_totals(policy_id: IdPath, ask: Ask) -> RetentionTotals:
    """Preview the totals of a stored policy: kept, deleted, and freed. Changes nothing."""
    policy = ask.find(POLICIES.find, policy_id, ask.visible)
    keep = Retention.from_dict(policy.keep)
    return ask.find(retention_totals, policy.root, policy.run_glob, keep, ask.now)


@feature.patch(_POLICY, tag="retention", scope="delete", errors=(404, 409, 412))
def change_retention_policy(
    policy_id: IdPath, body: PolicyChange, ask: Ask, match: IfMatch
) -> RetentionPolicy:
    """Change the given fields; a running job of the policy stops."""
    if body.run_glob is not None:
        check_pattern("run_glob", body.run_glob)
    values = body.model_dump(exclude_none=True) | {"maker": ask.caller.answerable}
    return POLICIES.change(ask, policy_id, match, values)


@feature.delete(_POLICY, tag="retention", scope="delete", status=204, errors=(404, 412))
def delete_retention_policy(policy_id: IdPath, ask: Ask, match: IfMatch) -> None:
    """Delete a policy. Deleted checkpoints stay deleted."""
    POLICIES.delete(ask, policy_id, match)


@feature.post(_POLICY + "/run", tag="retention", scope="delete", status=202)
def run_retention_policy(policy_id: IdPath, ask: Ask) -> Job:
    """Apply a policy now, by a job."""
    return ask.submit(RetentionKind, RetentionParams(policy_id=policy_id))


def _tried(body: PreviewRequest, ask: Ask) -> Retention:
    check_visible(ask.caller, body.root)
    check_pattern("run_glob", body.run_glob)
    return Retention.from_dict(body.keep.document())


def _preview(ask: Ask, page: PageParams, root: str, run_glob: str, keep: Retention) -> Page[RetentionPreview]:
    mark = query_mark("preview", root, run_glob)
    after = None if page.cursor is None else decode_cursor(page.cursor, mark, int)[0]
    limit = min(page.limit, _MAX_RUNS)
    with ask.reading() as connection:
        found = runs_of(connection, root, run_glob, after=after, limit=limit + 1)
        items: list[RetentionPreview] = []
        planned = 0
        for run_id, run in found[:limit]:
            plan = plan_run(connection, run_id, run, keep, ask.now)
            items.append(plan.preview)
            planned += len(plan.decisions)
            if planned >= _MAX_PLANNED:
                break
    return Page(tuple(items), encode_cursor(mark, items[-1].run_id) if len(found) > len(items) else None)


# -- deletion ------------------------------------------------------------------------------------------------


@feature.delete("/checkpoints/{checkpoint_id}", tag="deletion", scope="delete", errors=(404, 409, 412))
def delete_checkpoint(
    checkpoint_id: IdPath,
    ask: Ask,
    match: IfMatch,
    grace_seconds: Annotated[
        float | None,
        InQuery(ge=0, le=_MAX_GRACE_SECONDS, description="Time for a restore; default: as configured."),
    ] = None,
) -> CheckpointDetail:
    """Delete a checkpoint. The bytes stay until the end of the grace period, and the checkpoint can be
    restored.

    Pinned and aliased checkpoints are refused.
    """
    root = ask.find(get_checkpoint, checkpoint_id, ask.visible).root
    if root not in ask.settings.writable_roots:
        raise ForbiddenError(f"root {root} is read-only, or no longer configured")
    grace = ask.settings.delete_grace_seconds if grace_seconds is None else grace_seconds
    change = ask.change(match.version(f"c{checkpoint_id}"))

    def act(connection: Connection) -> CheckpointDetail:
        found = deletion.delete_softly(connection, checkpoint_id, grace, change)
        detail = {"grace_seconds": grace}
        change.record(connection, "checkpoint.delete", f"checkpoint:{checkpoint_id}", detail)
        return found

    found = ask.transact(act)
    ask.response.headers["ETag"] = found.etag
    return found


@feature.post("/checkpoints/{checkpoint_id}/restore", tag="deletion", scope="delete", errors=(404, 409, 412))
def restore_checkpoint(checkpoint_id: IdPath, ask: Ask, match: IfMatch) -> CheckpointDetail:
    """Restore a deleted checkpoint before its purge.

    The bytes count again: above a limit of the account or root, only admins of all roots can restore.
    """
    change = ask.change(match.version(f"c{checkpoint_id}"))

    def act(connection: Connection) -> CheckpointDetail:
        kept_by = () if ask.caller.may_everywhere("admin") else deletion.kept_by(connection, checkpoint_id)
        with keeping(connection, ask.service.allowances, kept_by):
            found = deletion.restore(connection, checkpoint_id, change)
        change.record(connection, "checkpoint.restore", f"checkpoint:{checkpoint_id}", {})
        ask.response.headers["ETag"] = found.etag
        return found

    return ask.transact(act)


# -- deletion and retention on the pages of checkpoints and runs ---------------------------------------------


_Pattern = Annotated[Text, Field(min_length=1, max_length=256)]
_Count = Annotated[int, Field(ge=1, le=10**12)]


@feature.panel("checkpoint.notices", "notice.html", order=20)
def deletion_notice(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Show the time and author of the deletion from the audit log, and a form to restore."""
    is_gone = found.state in ("deleted", "purged")
    return {"removal": ask.find(last_removal, found.id) if is_gone else None}


@feature.panel("checkpoint.actions", "delete.html", order=40)
def delete_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Offer the deletion of a checkpoint in a writable root."""
    root = ask.settings.roots.get(found.root)
    is_writable = root is not None and not root.readonly
    return {} if is_writable and ask.caller.may("delete", found.root) else None


@feature.form("/checkpoints/{checkpoint_id}/delete", scope="delete")
def delete_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Delete the checkpoint; a restore is possible during the grace period."""
    delete_checkpoint(checkpoint_id, ask, _seen(ask))
    return f"/checkpoints/{checkpoint_id}?{urlencode({'done': 'deleted'})}"


@feature.form("/checkpoints/{checkpoint_id}/restore", scope="delete")
def restore_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Undo the deletion."""
    restore_checkpoint(checkpoint_id, ask, _seen(ask))
    return f"/checkpoints/{checkpoint_id}?{urlencode({'done': 'restored'})}"


def _seen(ask: Ask) -> Precondition:
    """Return the state shown by the page; the answer is 412 after a change."""
    return Precondition(ask.form.optional("etag"))


# -- the page of a run ---------------------------------------------------------------------------------------


class TensorBytesQuery(Query):
    """Tensors by their names, in checkpoints of which steps."""

    only: Annotated[
        tuple[_Pattern, ...],
        Field(max_length=16, description="Globs on names; default: optimizer states."),
    ] = ()
    below_step: Annotated[
        Step | None, Field(description="Only checkpoints of lower steps; default: all.")
    ] = None


@feature.get("/runs/{run_id}/tensor-bytes", tag="runs")
def get_run_tensor_bytes(
    run_id: IdPath, query: Annotated[TensorBytesQuery, InQuery()], ask: Ask
) -> TensorBytes:
    """Return the bytes of selected tensors in the checkpoints of a run; default: optimizer states."""
    only = query.only or OPTIMIZER
    return ask.find(tensor_bytes, run_id, ask.visible, only=only, below_step=query.below_step)


class PreviewQuery(BaseModel):
    """The rules of a preview in the address of a run's page."""

    keep_last: _Count | None = None
    keep_every: _Count | None = None
    keep_best: _Count | None = None
    keep_metric: Name | None = None
    keep_mode: Literal["min", "max"] = "min"
    keep_optimizer: _Count | None = None
    keep_days: Annotated[float, Field(gt=0, le=36_500, allow_inf_nan=False)] | None = None
    below_step: Step | None = None

    @property
    def keep(self) -> Keep | None:
        """Rules, or None without rules."""
        given: dict[str, Any] = {"last": self.keep_last, "every_steps": self.keep_every}
        if self.keep_best and self.keep_metric:
            given["best"] = [{"metric": self.keep_metric, "count": self.keep_best, "mode": self.keep_mode}]
        if self.keep_days:
            given["younger_than_seconds"] = self.keep_days * 86_400
        if self.keep_optimizer:
            given["optimizer"] = {"last": self.keep_optimizer}
        given = {name: value for name, value in given.items() if value is not None}
        return Keep(**given) if given else None


@feature.panel("run", "preview.html", order=20, query=PreviewQuery)
def preview_panel(ask: Ask, run: Run) -> dict[str, Any]:
    """Show the effect of rules on the run without applying them."""
    query = ask.query(PreviewQuery)
    preview = saved = None
    if query.keep is not None:
        retention = Retention.from_dict(query.keep.document())
        preview = ask.find(plan_run, run.id, run.key, retention, ask.now).preview
    if query.below_step is not None:
        saved = ask.find(tensor_bytes, run.id, ask.visible, below_step=query.below_step)
    return {"query": query, "preview": preview, "tensor_bytes": saved}
