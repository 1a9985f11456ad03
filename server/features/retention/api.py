"""``/retention``: policies, what they would do, and doing it now."""

from __future__ import annotations

from fastapi import Response
from sqlalchemy import Connection

from dcp.manager.retention import Retention
from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.names import check_pattern
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import (
    Author,
    Caller,
    IfMatch,
    Page,
    PageParams,
    ServiceDep,
    Writer,
    check_visible,
    requires,
)
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.http.routers import api_router
from dcp.server.core.jobs.answers import JobAnswer
from dcp.server.core.jobs.submitting import submit_kind
from dcp.server.core.problems import ForbiddenError, NotFoundError
from dcp.server.features.retention import policies
from dcp.server.features.retention.answers import (
    PolicyAnswer,
    PolicyChange,
    PolicyPage,
    PolicyRequest,
    PreviewPage,
    PreviewRequest,
    RunPreview,
    TotalsAnswer,
)
from dcp.server.features.retention.job import RetentionParams
from dcp.server.features.retention.planning import plan_run, runs_of
from dcp.server.features.retention.policies import PolicyRow
from dcp.server.features.retention.totals import retention_totals

__all__ = ["router"]

router = api_router("/retention", tags=["retention"])

_CURSOR = "retention"
_MAX_RUNS = 50
_MAX_PLANNED = 5_000
"""Checkpoints behind which a page ends: a run with more is one of its own."""


@router.post("/policies", status_code=201, dependencies=[requires("delete")], responses=problems(404, 409))
def create_retention_policy(
    body: PolicyRequest,
    service: ServiceDep,
    author: Author,
    transact: IdempotentDep,
    response: Response,
) -> PolicyAnswer:
    """Make a policy. It is applied at once, and then as often as it says; try it out before."""
    _check_root(service, author, body.root)
    new = body.policy(service.settings.delete_grace_seconds)

    def act(connection: Connection) -> PolicyAnswer:
        policy = policies.create_policy(connection, new, author.now_seconds)
        _note(connection, author, "retention.create", policy)
        response.headers["Location"] = f"/api/v1/retention/policies/{policy.id}"
        response.headers["ETag"] = policy.etag
        return PolicyAnswer.of(policy)

    return transact(act)


@router.get("/policies", dependencies=[requires("read")])
def list_retention_policies(service: ServiceDep, caller: Caller, page: Page) -> PolicyPage:
    """Policies of the roots that this key may see, by id."""
    after = 0 if page.cursor is None else decode_cursor(page.cursor, _CURSOR, int)[0]
    with service.database.read() as connection:
        found = policies.list_policies(connection, caller.roots, after=after, limit=page.limit + 1)
    shown = found[: page.limit]
    more = encode_cursor(_CURSOR, shown[-1].id) if len(found) > page.limit else None
    return PolicyPage(items=[PolicyAnswer.of(policy) for policy in shown], next_cursor=more)


@router.post("/preview", dependencies=[requires("read")], responses=problems(404))
def preview_retention(body: PreviewRequest, service: ServiceDep, caller: Caller, page: Page) -> PreviewPage:
    """What a policy would do now, run by run; nothing is changed."""
    check_visible(caller, body.root)
    check_pattern("run_glob", body.run_glob)
    keep = Retention.from_dict(body.keep.document())
    return _preview(service, page, body.root, body.run_glob, keep)


@router.post("/preview/totals", dependencies=[requires("read")], responses=problems(404))
def preview_retention_totals(body: PreviewRequest, service: ServiceDep, caller: Caller) -> TotalsAnswer:
    """What a policy would keep, delete and free now, in all; nothing is changed."""
    check_visible(caller, body.root)
    check_pattern("run_glob", body.run_glob)
    keep = Retention.from_dict(body.keep.document())
    with service.database.read() as connection:
        found = retention_totals(connection, body.root, body.run_glob, keep, service.clock())
    return TotalsAnswer.of(found)


@router.get("/policies/{policy_id}", dependencies=[requires("read")], responses=problems(404))
def get_retention_policy(
    policy_id: IdPath, service: ServiceDep, caller: Caller, response: Response
) -> PolicyAnswer:
    """One policy."""
    with service.database.read() as connection:
        policy = policies.get_policy(connection, policy_id, caller.roots)
    response.headers["ETag"] = policy.etag
    return PolicyAnswer.of(policy)


@router.get("/policies/{policy_id}/preview", dependencies=[requires("read")], responses=problems(404))
def preview_retention_policy(
    policy_id: IdPath, service: ServiceDep, caller: Caller, page: Page
) -> PreviewPage:
    """What it would do now, run by run; nothing is changed."""
    with service.database.read() as connection:
        policy = policies.get_policy(connection, policy_id, caller.roots)
    return _preview(service, page, policy.root, policy.run_glob, policy.retention)


@router.get("/policies/{policy_id}/preview/totals", dependencies=[requires("read")], responses=problems(404))
def preview_retention_policy_totals(policy_id: IdPath, service: ServiceDep, caller: Caller) -> TotalsAnswer:
    """What it would keep, delete and free now, in all; nothing is changed."""
    with service.database.read() as connection:
        policy = policies.get_policy(connection, policy_id, caller.roots)
        found = retention_totals(connection, policy.root, policy.run_glob, policy.retention, service.clock())
    return TotalsAnswer.of(found)


@router.patch("/policies/{policy_id}", dependencies=[requires("delete")], responses=problems(404, 409, 412))
def change_retention_policy(
    policy_id: IdPath,
    body: PolicyChange,
    service: ServiceDep,
    author: Author,
    if_match: IfMatch,
    response: Response,
) -> PolicyAnswer:
    """Change what is given; a run of it that is under way stops."""
    expected = if_match.version(f"p{policy_id}")

    def act(connection: Connection) -> PolicyRow:
        policy = policies.update_policy(
            connection,
            policy_id,
            body.values(),
            author.now_seconds,
            expected_version=expected,
            visible=author.principal.roots,
        )
        _note(connection, author, "retention.change", policy)
        return policy

    policy = service.database.transact(act)
    response.headers["ETag"] = policy.etag
    return PolicyAnswer.of(policy)


@router.delete(
    "/policies/{policy_id}", status_code=204, dependencies=[requires("delete")], responses=problems(404, 412)
)
def delete_retention_policy(
    policy_id: IdPath, service: ServiceDep, author: Author, if_match: IfMatch
) -> None:
    """Remove it. What it has deleted stays deleted."""
    expected = if_match.version(f"p{policy_id}")

    def act(connection: Connection) -> None:
        policy = policies.delete_policy(
            connection, policy_id, expected_version=expected, visible=author.principal.roots
        )
        _note(connection, author, "retention.delete", policy)

    service.database.transact(act)


@router.post(
    "/policies/{policy_id}/run", status_code=202, dependencies=[requires("delete")], responses=problems(404)
)
def run_retention_policy(
    policy_id: IdPath, service: ServiceDep, author: Author, transact: IdempotentDep, response: Response
) -> JobAnswer:
    """Apply it now, as a job."""
    return submit_kind("retention", RetentionParams(policy_id=policy_id), service, author, transact, response)


def _check_root(service: Service, author: Writer, root: str) -> None:
    check_visible(author.principal, root)
    if root not in service.settings.roots:
        raise NotFoundError(f"there is no root {root!r}")
    if service.settings.roots[root].readonly:
        raise ForbiddenError(f"root {root} is read-only")


def _note(connection: Connection, author: Writer, action: str, policy: PolicyRow) -> None:
    detail = {
        "name": policy.name,
        "root": policy.root,
        "run_glob": policy.run_glob,
        "keep": dict(policy.keep),
    }
    author.change(None).record(connection, action, f"retention:{policy.id}", detail)


def _preview(service: Service, page: PageParams, root: str, run_glob: str, keep: Retention) -> PreviewPage:
    mark = query_mark("preview", root, run_glob)
    after = None if page.cursor is None else decode_cursor(page.cursor, mark, int)[0]
    limit = min(page.limit, _MAX_RUNS)
    with service.database.read() as connection:
        found = runs_of(connection, root, run_glob, after=after, limit=limit + 1)
        items: list[RunPreview] = []
        planned = 0
        for run_id, run in found[:limit]:
            plan = plan_run(connection, run_id, run, keep, service.clock())
            items.append(RunPreview.of(plan))
            planned += len(plan.decisions)
            if planned >= _MAX_PLANNED:
                break
    more = encode_cursor(mark, items[-1].run_id) if len(found) > len(items) else None
    return PreviewPage(items=items, next_cursor=more)
