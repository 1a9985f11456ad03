"""What changed in a checkpoint since the step before, for the areas on its page, by a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fastapi import Response
from fastapi.responses import RedirectResponse

from dcp.server.catalog.values import short_name
from dcp.server.core.answers import IdPath
from dcp.server.core.http.dependencies import Author, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.jobs.submitting import submit_kind
from dcp.server.core.pages.queries import pages_router
from dcp.server.core.pages.tokens import FormDep
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.diff.drawing import WeightChange, changes_of
from dcp.server.features.diff.job import DiffParams

if TYPE_CHECKING:
    from dcp.server.features.diff.differences import ContentDifference

__all__ = ["changes_below", "changes_of_list", "router"]

router = pages_router()


def changes_below(found: ContentDifference, prefix: str, nodes: Any) -> dict[str, WeightChange]:
    """Of the nodes of one level of the tree."""
    start = f"{prefix}." if prefix else ""

    def name_of(fqn: str) -> str | None:
        return fqn[len(start) :].partition(".")[0] if fqn.startswith(start) else None

    return changes_of(found.tensors, [(node.name, node.bytes) for node in nodes], name_of)


def changes_of_list(found: ContentDifference, entries: Any) -> dict[str, WeightChange]:
    """Of tensors by their names."""
    return changes_of(found.tensors, [(entry.fqn, entry.bytes) for entry in entries], short_name)


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
