"""What changed in a checkpoint since the step before, for the areas on its page, by a job."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from fastapi import Response
from fastapi.responses import RedirectResponse

from dcp.server.http.dependencies import Author, Db, PageParams, ServiceDep, requires
from dcp.server.http.idempotent_transaction import IdempotentDep
from dcp.server.jobs.kinds.diff import DiffParams
from dcp.server.pages.drawings.changes import Change, changes_of
from dcp.server.pages.queries import pages_router
from dcp.server.pages.tokens import FormDep
from dcp.server.problems import UnprocessableError
from dcp.server.routes.jobs import jobs as api
from dcp.server.routes.jobs.submitting import submit_kind
from dcp.server.schemas.checkpoints import CheckpointAnswer
from dcp.server.schemas.common import IdPath
from dcp.server.schemas.jobs import JobAnswer
from dcp.server.security.principal import Principal

__all__ = ["changes_below", "changes_of_list", "diff_job", "router"]

router = pages_router()

_JOBS: Final = 20
_STATES: Final[Any] = ["queued", "planning", "running", "publishing", "succeeded", "failed"]


def diff_job(
    found: CheckpointAnswer, before: CheckpointAnswer, database: Db, caller: Principal
) -> JobAnswer | None:
    """The newest that compares all of the two as they are now, with its whole result if it has ended."""
    wanted = DiffParams(a=before.id, b=found.id).model_dump(mode="json")
    page_of = PageParams(_JOBS, None)
    jobs = api.list_jobs(database, caller, page_of, _STATES, ["diff"], checkpoint_id=found.id).items
    since = max(filter(None, (found.committed_at, before.committed_at)), default="")
    chosen = next((job for job in jobs if job.params == wanted and job.created_at >= since), None)
    return None if chosen is None else api.get_job(chosen.id, database, caller)


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
