"""``/checkpoints/{id}/diff``: what differs from another checkpoint, at once, as far as the indexes tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Query

from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.names import check_pattern
from dcp.server.catalog.values import clean_text
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.data.access import DataAccess, DataDep
from dcp.server.core.http.dependencies import Caller, Page, requires
from dcp.server.core.http.routers import api_router
from dcp.server.core.inputs import MAX_ID
from dcp.server.core.problems import NotFoundError
from dcp.server.core.security.principal import Principal
from dcp.server.features.diff.kept import Differences
from dcp.server.features.tensors.answers import DiffAnswer
from dcp.server.records.contents import Basis, DifferenceKind, DifferenceOrder

__all__ = ["router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])

_MAX_OBJECTS = 500
_BASIS = (
    "values: as the job diff has found last, not found before that; else checksums where both have them in "
    "their indexes, else structure."
)


@router.get("/diff", responses=problems(400, 401, 403, 404, 409, 410, 421, 422, 429, 503))
def diff_checkpoints(
    checkpoint_id: IdPath,
    before: Annotated[int, Query(ge=1, le=MAX_ID, description="The checkpoint to compare with.")],
    data: DataDep,
    caller: Caller,
    page: Page,
    basis: Annotated[Basis | None, Query(description=_BASIS)] = None,
    kind: Annotated[
        list[DifferenceKind] | None, Query(max_length=6, description="All, if not given.")
    ] = None,
    glob: Annotated[str | None, Query(min_length=1, max_length=256, examples=["layers.*.weight"])] = None,
    order: Annotated[
        DifferenceOrder,
        Query(
            description="Those first that differ most; name: as they were saved; weights: by relative_l2, "
            "those of optimizers last."
        ),
    ] = "name",
) -> DiffAnswer:
    """What differs from the checkpoint `before`. No tensor is read; for values there is the job `diff`."""
    from dcp.server.features.diff.differences import (
        chosen,  # only here: a service is to answer soon after its start
    )

    if glob is not None:
        check_pattern("glob", glob)
    mark, found, others = _found(checkpoint_id, before, data, caller, basis)
    mark = query_mark("diff", before, checkpoint_id, mark, basis, kind, glob, order)
    begin = max(0, decode_cursor(page.cursor, mark, int)[0]) if page.cursor is not None else 0
    end = begin + page.limit
    tensors = chosen(found, kind or (), glob, order)
    return DiffAnswer.of(
        found,
        a=before,
        b=checkpoint_id,
        equal_tensors=found.equal,
        matching=len(tensors),
        tensors=[replace(one, fqn=clean_text(one.fqn)) for one in tensors[begin:end]],
        objects=[replace(one, fqn=clean_text(one.fqn)) for one in found.objects[:_MAX_OBJECTS]],
        next_cursor=encode_cursor(mark, end) if end < len(tensors) else None,
        **others,
    )


def _found(
    checkpoint_id: int, before: int, data: DataAccess, caller: Principal, basis: Basis | None
) -> tuple[object, Any, dict[str, Any]]:
    """What names its content, the difference, and the job that has found it."""
    if basis == "values":
        kept = data.service.own(Differences).kept(before, checkpoint_id, caller)
        if kept is None:
            raise NotFoundError(
                f"the values of {before} and {checkpoint_id} have not been compared, or one was replaced "
                "since; the job diff does it"
            )
        job, found = kept
        return job.id, found, {"job_id": job.id, "created_at": job.created_at}
    second = data.open(checkpoint_id, caller)
    first = data.open(before, caller)
    found = data.service.own(Differences).of_indexes(first, second, basis)
    return (first.opened.stamp, second.opened.stamp), found, {"job_id": None, "created_at": None}
