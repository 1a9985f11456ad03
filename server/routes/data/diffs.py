"""``/checkpoints/{id}/diff``: what differs from another checkpoint, at once, as far as the indexes tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query

from dcp.server.catalog.queries.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.values import clean_text
from dcp.server.data.access import DataDep
from dcp.server.http.dependencies import Caller, Page, requires
from dcp.server.inputs import MAX_ID
from dcp.server.records.contents import Basis
from dcp.server.schemas.common import IdPath, problems
from dcp.server.schemas.data import DiffAnswer

__all__ = ["router"]

router = APIRouter(prefix="/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])

_MAX_OBJECTS = 500


@router.get("/diff", responses=problems(400, 401, 403, 404, 409, 410, 421, 422, 429, 503))
def diff_checkpoints(
    checkpoint_id: IdPath,
    before: Annotated[int, Query(ge=1, le=MAX_ID, description="The checkpoint to compare with.")],
    data: DataDep,
    caller: Caller,
    page: Page,
    basis: Annotated[
        Basis | None, Query(description="checksums where both have them in their indexes, else structure.")
    ] = None,
) -> DiffAnswer:
    """What differs from the checkpoint `before`. No tensor is read; for values there is the job `diff`."""
    from dcp.server.data.differences import compare  # only here: a service is to answer soon after its start

    second = data.open(checkpoint_id, caller)
    first = data.open(before, caller)
    mark = query_mark("diff", before, checkpoint_id, first.opened.stamp, second.opened.stamp, basis)
    begin = max(0, decode_cursor(page.cursor, mark, int)[0]) if page.cursor is not None else 0
    with second.problems(), first.problems():
        found = compare(first.opened, second.opened, basis)
    end = begin + page.limit
    return DiffAnswer.of(
        found,
        a=before,
        b=checkpoint_id,
        equal_tensors=found.equal,
        object_count=len(found.objects),
        tensors=[replace(one, fqn=clean_text(one.fqn)) for one in found.tensors[begin:end]],
        objects=[replace(one, fqn=clean_text(one.fqn)) for one in found.objects[:_MAX_OBJECTS]],
        next_cursor=encode_cursor(mark, end) if end < len(found.tensors) else None,
    )
