"""What changed in a checkpoint since the step before, for the areas on its page, by a job."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import Response
from fastapi.responses import RedirectResponse

from dcp.server.http.dependencies import Author, Db, ServiceDep, requires
from dcp.server.http.idempotent_transaction import IdempotentDep
from dcp.server.jobs.kinds.diff import DiffParams
from dcp.server.pages.drawings.changes import Change, changes_of
from dcp.server.pages.queries import pages_router
from dcp.server.pages.routes.jobs import last_job
from dcp.server.pages.tokens import FormDep
from dcp.server.problems import UnprocessableError
from dcp.server.routes.jobs.submitting import submit_kind
from dcp.server.schemas.checkpoints import CheckpointAnswer
from dcp.server.schemas.common import IdPath
from dcp.server.schemas.jobs import JobAnswer
from dcp.server.security.principal import Principal

__all__ = ["changes_below", "changes_of_list", "diff_job", "router"]

router = pages_router()


def diff_job(
    found: CheckpointAnswer, before: CheckpointAnswer, database: Db, caller: Principal
) -> JobAnswer | None:
    """The newest that compares all of the two as they are now, with its whole result if it has ended."""
    job = last_job("diff", DiffParams(a=before.id, b=found.id).dedup_key, database, caller)
    since = max(filter(None, (found.committed_at, before.committed_at)), default="")
    return None if job is None or job.state == "cancelled" or job.created_at < since else job


def changes_below(job: JobAnswer, prefix: str, nodes: Any) -> dict[str, Change]:
    """Of the nodes of one level of the tree."""
    start = f"{prefix}." if prefix else ""

    def name_of(fqn: str) -> str | None:
        return fqn[len(start) :].partition(".")[0] if fqn.startswith(start) else None

    return changes_of(job.result or {"tensors": []}, [(node.name, node.bytes) for node in nodes], name_of)


def changes_of_list(job: JobAnswer, entries: Any) -> dict[str, Change]:
    """Of tensors by their names."""
    sizes = [(entry.fqn, entry.bytes) for entry in entries]
    return changes_of(job.result or {"tensors": []}, sizes, lambda fqn: fqn)


@router.post("/checkpoints/{checkpoint_id}/change", dependencies=[requires("read")])
def change_form(
    checkpoint_id: IdPath,
    form: FormDep,
    service: ServiceDep,
    author: Author,
    transact: IdempotentDep,
) -> Response:
    """Have it compared with another one, value by value, and go back to its page."""
    before = form.text("before")
    if not before.isdecimal() or len(before) > 18:
        raise UnprocessableError("before: the number of a checkpoint", field="before")
    params = DiffParams(a=int(before), b=checkpoint_id)
    submit_kind("diff", params, service, author, transact, Response())
    query = {"colour": "change", **({"prefix": prefix} if (prefix := form.text("prefix")) else {})}
    return RedirectResponse(f"/checkpoints/{checkpoint_id}?{urlencode(query)}#tensors", 303)
