"""``/checkpoints/{id}/tensors``: names as pages and as a tree; one tensor, or a slice of it."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Depends, Query, Request, Response

from dcp.server.catalog.tensors import tensors_page, tree_level
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.data.access import DataDep
from dcp.server.core.data.sending.responses import (
    BodyResponse,
    choose_range,
    disposition,
    is_unchanged,
    not_modified,
)
from dcp.server.core.http.dependencies import Caller, Db, Page, requires
from dcp.server.core.http.routers import api_router
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.tensors.answers import (
    TensorAnswer,
    TensorPage,
    TreeNodeAnswer,
    TreePageAnswer,
    binary,
)
from dcp.server.features.tensors.slices import TensorFormat, parse_slices

__all__ = ["router"]

router = api_router("/checkpoints/{checkpoint_id}/tensors", tags=["data"], dependencies=[requires("read")])

_USUAL = (400, 401, 403, 404, 421, 422, 429, 503)
_MAX_NAME = 4096

_Fqn = Annotated[str | None, Query(min_length=1, max_length=_MAX_NAME, description="Its name.")]
_OldFqn = Annotated[
    str | None,
    Query(alias="name", min_length=1, max_length=_MAX_NAME, deprecated=True, description="The same as fqn."),
]


async def _fqn(fqn: _Fqn = None, old: _OldFqn = None) -> str:
    if fqn is None and old is None:
        raise UnprocessableError("which tensor? fqn is its name, as the list of tensors has it", field="fqn")
    if None not in (fqn, old) and fqn != old:
        raise UnprocessableError("fqn and name are two words for one thing: give one", field="name")
    return fqn or old or ""


Fqn = Annotated[str, Depends(_fqn)]


@router.get("", responses=problems(*_USUAL))
def list_tensors(
    checkpoint_id: IdPath,
    database: Db,
    data: DataDep,
    caller: Caller,
    page: Page,
    glob: Annotated[str | None, Query(min_length=1, max_length=256, examples=["layers.*.weight"])] = None,
    kind: Literal["tensor", "object"] | None = None,
    dtype: Annotated[str | None, Query(max_length=32, examples=["bfloat16"])] = None,
) -> TensorPage:
    """Tensors and values by name, as they were when the checkpoint was found; nothing is read."""
    row = data.row(checkpoint_id, caller)
    if row.structure_id is None:
        return TensorPage(items=[], next_cursor=None)
    with database.read() as connection:
        found = tensors_page(
            connection,
            row.structure_id,
            limit=page.limit,
            cursor=page.cursor,
            glob=glob,
            kind=kind,
            dtype=dtype,
        )
    return TensorPage(items=[TensorAnswer.of(entry) for entry in found.items], next_cursor=found.next_cursor)


@router.get("/tree", responses=problems(*_USUAL))
def tensor_tree(
    checkpoint_id: IdPath,
    database: Db,
    data: DataDep,
    caller: Caller,
    page: Page,
    prefix: Annotated[
        str, Query(max_length=_MAX_NAME, description="A name without its last dot; the top without it.")
    ] = "",
) -> TreePageAnswer:
    """One level of the tree that the dots in the names make."""
    row = data.row(checkpoint_id, caller)
    if row.structure_id is None:
        return TreePageAnswer(prefix=prefix, items=[], next_cursor=None)
    with database.read() as connection:
        found = tree_level(connection, row.structure_id, prefix, limit=page.limit, cursor=page.cursor)
    nodes = [TreeNodeAnswer.of(node) for node in found.items]
    return TreePageAnswer(prefix=prefix, items=nodes, next_cursor=found.next_cursor)


@router.head("/data", name="head_tensor", include_in_schema=False)
@router.get(
    "/data",
    name="tensor_data",
    response_class=Response,
    responses={**binary("The file."), **problems(409, 410, 412, 416, *_USUAL)},
)
def tensor_data(
    checkpoint_id: IdPath,
    fqn: Fqn,
    request: Request,
    data: DataDep,
    caller: Caller,
    taken: Annotated[
        str | None,
        Query(alias="slice", max_length=512, description="As numpy has it.", examples=["0:2,:,-1"]),
    ] = None,
    to: Annotated[
        TensorFormat, Query(alias="format", description=".npy has float32 for what numpy has not.")
    ] = "npy",
) -> Response:
    """One tensor, or a slice of it, as .npy or .safetensors. Only what this needs is read, and compared."""
    from dcp.server.features.tensors.values import (
        plan_tensor,  # only here: a service is to answer soon after its start
    )

    slices = parse_slices(taken)
    found = data.open(checkpoint_id, caller)
    etag = found.opened.etag("tensor", fqn, slices, to)
    with found.problems():
        planned = plan_tensor(found.opened, fqn, slices, to)
    if is_unchanged(request.headers, etag):
        return not_modified(etag)
    name = f"{fqn}.{to}"
    headers = {
        "ETag": etag,
        "Content-Disposition": disposition(name),
        "X-DCP-Dtype": planned.stored_dtype,
        "X-DCP-Shape": ",".join(map(str, planned.shape)),
    }
    chosen = choose_range(request.headers, planned.body.size_bytes, etag)
    return BodyResponse(
        planned.body,
        chosen,
        data.streams,
        headers=headers,
        problem=found.root.problem,
        is_allowed=found.is_allowed,
    )
