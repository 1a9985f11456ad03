"""Tensors in the API: names as pages and as a tree; values and statistics of a tensor or slice."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args
from urllib.parse import urlencode

from fastapi import Depends, Query, Response

from dcp.server.catalog.cursors import encode_cursor, offset_of, query_mark
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.structures import Tensor, TreeNode, tensors_page, tree_level
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.data.responses import NOT_MODIFIED, binary, is_unchanged, not_modified
from dcp.server.core.http.dependencies import PageQuery, requires
from dcp.server.core.http.routes import api_router
from dcp.server.core.pages.requests import FormDep
from dcp.server.core.problems import NotFoundError, UnprocessableError
from dcp.server.database.documents import find_item
from dcp.server.features.tensors import (
    GridValue,
    MeasuredTensor,
    Statistics,
    StatsKind,
    StatsParams,
    TensorGrid,
    feature,
    stored_statistics,
    tensors_of,
)
from dcp.server.records.declaring import Shown
from dcp.server.records.jobs import Job
from dcp.server.records.lists import Page

if TYPE_CHECKING:
    from dcp.inspection.values.tensor_reading import Slices


@dataclass(frozen=True, slots=True)
class TreePage:
    """Level of the tree of names in order."""

    prefix: Annotated[str, Shown("Name of the node; empty: the top.")]
    items: tuple[TreeNode, ...]
    next_cursor: Annotated[
        str | None, Shown("`cursor` of the request for the next page; null: this is the last page.")
    ]


router = api_router("/checkpoints/{checkpoint_id}/tensors", tags=["data"], dependencies=[requires("read")])

_TENSORS: Final = "/checkpoints/{checkpoint_id}/tensors"
_STATISTICS: Final = "/checkpoints/{checkpoint_id}/statistics"
_ERRORS: Final = (400, 401, 403, 404, 421, 422, 429, 503)
_READ_ERRORS: Final = (409, 410, 412, *_ERRORS)
_MAX_NAME: Final = 4096
_MAX_SLICES: Final = 64
_PART: Final = re.compile(
    r"(?P<start>-?[0-9]{1,18})?(?:(?P<is_slice>:)(?P<stop>-?[0-9]{1,18})?(?::(?P<step>-?[0-9]{1,18})?)?)?"
)

_Fqn = Annotated[str | None, Query(min_length=1, max_length=_MAX_NAME, description="Its name.")]
_OldFqn = Annotated[
    str | None,
    Query(alias="name", min_length=1, max_length=_MAX_NAME, deprecated=True, description="The same as fqn."),
]
_Slice = Annotated[
    str | None,
    Query(alias="slice", max_length=512, description="Slice in numpy notation.", examples=["0:2,:,-1"]),
]
_Side = Annotated[int, Query(ge=1, le=256, description="As many cells at most.")]


async def _fqn(fqn: _Fqn = None, old: _OldFqn = None) -> str:
    if fqn is None and old is None:
        raise UnprocessableError("fqn is required: the name of a tensor, as in the list", field="fqn")
    if None not in (fqn, old) and fqn != old:
        raise UnprocessableError("fqn and name are synonyms: pass only one", field="name")
    return fqn or old or ""


Fqn = Annotated[str, Depends(_fqn)]


def parse_slices(text: str | None) -> Slices | None:
    """Parse ``0:2,:,3`` like numpy; None without a text. Raises UnprocessableError for other texts."""
    if text is None or not text.strip():
        return None
    parts: list[slice | int | EllipsisType] = []
    for part in text.split(",", _MAX_SLICES):
        stripped = part.strip()
        match = _PART.fullmatch(stripped)
        if stripped == "...":
            parts.append(...)
        elif match is None or not stripped or (match["step"] and int(match["step"]) == 0):
            raise UnprocessableError(
                f"slice: {part[:40]!r} is not an index or slice, such as 3, 0:2, ::-1 or ...", field="slice"
            )
        elif match["is_slice"]:
            numbers = (match["start"], match["stop"], match["step"])
            parts.append(slice(*(int(number) if number else None for number in numbers)))
        else:
            parts.append(int(match["start"]))
    return tuple(parts)


@feature.get(_TENSORS, tag="data", errors=_ERRORS)
def list_tensors(
    checkpoint_id: IdPath,
    ask: Ask,
    page: PageQuery,
    glob: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=256,
            description="Glob for names of tensors; * matches any characters.",
            examples=["layers.*.weight"],
        ),
    ] = None,
    kind: Annotated[
        Literal["tensor", "object"] | None, Query(description="object: values that are not tensors.")
    ] = None,
    dtype: Annotated[
        str | None, Query(max_length=32, description="Dtype of the tensors.", examples=["bfloat16"])
    ] = None,
) -> Page[Tensor]:
    """List tensors and values by name from the catalog, without reading storage."""
    row = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    if row.structure_id is None:
        return Page((), None)
    given: dict[str, Any] = {"glob": glob, "kind": kind, "dtype": dtype}
    return ask.find(tensors_page, row.structure_id, limit=page.limit, cursor=page.cursor, **given)


@feature.get(_TENSORS + "/tree", tag="data", errors=_ERRORS)
def tensor_tree(
    checkpoint_id: IdPath,
    ask: Ask,
    page: PageQuery,
    prefix: Annotated[
        str,
        Query(
            max_length=_MAX_NAME, description="Prefix of names, without the last dot; default: the top level."
        ),
    ] = "",
    collapsed: Annotated[bool, Query(description="Merge names with a single child: model.decoder.")] = False,
) -> TreePage:
    """Return a level of the tree of dotted names."""
    row = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    if row.structure_id is None:
        return TreePage(prefix, (), None)
    options: dict[str, Any] = {"limit": page.limit, "cursor": page.cursor, "is_collapsed": collapsed}
    found = ask.find(tree_level, row.structure_id, prefix, **options)
    return TreePage(prefix, found.items, found.next_cursor)


@router.head("/data", name="head_tensor", include_in_schema=False)
@router.get(
    "/data",
    name="tensor_data",
    response_class=Response,
    responses={**binary("The file."), **problems(416, *_READ_ERRORS)},
)
def tensor_data(
    checkpoint_id: IdPath,
    fqn: Fqn,
    ask: AskDep,
    taken: _Slice = None,
    to: Annotated[
        Literal["npy", "safetensors"],
        Query(alias="format", description=".npy uses float32 for dtypes unknown to numpy."),
    ] = "npy",
) -> Response:
    """Download a tensor or slice as .npy or .safetensors. Reads and verifies the required bytes only."""
    from dcp.server.features.tensors.values import plan_tensor  # imports numpy

    slices = parse_slices(taken)
    found = ask.data.open(checkpoint_id)
    etag = found.opened.etag("tensor", fqn, slices, to)
    with found.problems():
        body, dtype, shape = plan_tensor(found.opened, fqn, slices, to)
    if is_unchanged(ask.request.headers, etag):
        return not_modified(etag)
    headers = {"X-DCP-Dtype": dtype, "X-DCP-Shape": ",".join(map(str, shape))}
    return ask.data.answer(ask.request, found, body, f"{fqn}.{to}", etag, headers)


@feature.get(_TENSORS + "/grid", tag="data", errors=_READ_ERRORS, responses=NOT_MODIFIED)
def get_tensor_grid(
    checkpoint_id: IdPath,
    fqn: Fqn,
    ask: Ask,
    taken: Annotated[
        str | None,
        Query(
            alias="slice",
            max_length=512,
            description="Slice with two remaining dimensions.",
            examples=["0,:,:"],
        ),
    ] = None,
    rows: _Side = 128,
    columns: _Side = 128,
    value: Annotated[list[GridValue] | None, Query(max_length=5, description="All, if not given.")] = None,
) -> TensorGrid:
    """Return a tensor or slice in cells with the mean, minimum, and maximum.

    Reads the required bytes only; above about ten million elements, reads a part of each cell.
    """
    from dcp.server.features.tensors.values import tensor_grid

    slices = parse_slices(taken)
    found = ask.data.open(checkpoint_id)
    ask.tag(found.opened.etag("grid", fqn, slices, rows, columns, value))
    with found.problems():
        grid = tensor_grid(found.opened, fqn, slices, rows=rows, columns=columns)
    left_out = () if value is None else set(get_args(GridValue)) - set(value)
    emptied: dict[str, Any] = dict.fromkeys(left_out, ())
    return replace(grid, **emptied)


@feature.get(_TENSORS + "/statistics", tag="data", errors=_READ_ERRORS)
def get_tensor_statistics(checkpoint_id: IdPath, fqn: Fqn, ask: Ask) -> MeasuredTensor:
    """Return statistics of a tensor from a job; without a job, read a tensor of moderate size."""
    from dcp.server.features.tensors.values import tensor_statistics

    kept = kept_statistics(ask, checkpoint_id, fqn)
    if kept is not None:
        return kept
    found = ask.data.open(checkpoint_id)
    with found.problems():
        return tensor_statistics(found.opened, fqn)


# -- statistics ----------------------------------------------------------------------------------------------


@feature.get(_STATISTICS, tag="data")
def get_statistics(checkpoint_id: IdPath, ask: Ask, page: PageQuery) -> Statistics:
    """Return the stored statistics; not found before the first computation. Pages contain tensors."""
    with ask.reading() as connection:
        found = stored_statistics(connection, checkpoint_id, ask.visible)
        if found is None:
            raise NotFoundError(
                f"statistics of checkpoint {checkpoint_id} are not computed yet; send a POST to this path"
            )
        mark = query_mark("statistics", checkpoint_id, found.created_at)
        begin = offset_of(page.cursor, mark)
        end = begin + page.limit
        tensors = tuple(tensors_of(connection, found, begin, end))
    return replace(
        found, tensors=tensors, next_cursor=None if end >= found.tensor_count else encode_cursor(mark, end)
    )


@feature.post(_STATISTICS, tag="data", scope="read", status=202, errors=(404, 409, 410))
def compute_statistics(checkpoint_id: IdPath, ask: Ask) -> Job:
    """Compute the statistics of all tensors, by a job; they are kept with the checkpoint."""
    return ask.submit(StatsKind, StatsParams(checkpoint_id=checkpoint_id))


@feature.form(_STATISTICS, scope="read")
def statistics_form(checkpoint_id: IdPath, form: FormDep, ask: Ask) -> str:
    """Submit a job for the statistics of all tensors, and return to the form."""
    compute_statistics(checkpoint_id, ask)
    fqn = form.optional("fqn")
    below = f"tensors?{urlencode({'fqn': fqn})}" if fqn else "layers"
    return f"/checkpoints/{checkpoint_id}/{below}"


def kept_statistics(ask: Ask, checkpoint_id: int, fqn: str) -> MeasuredTensor | None:
    """Return statistics of a tensor from a job. None without a job, or if the checkpoint was replaced later.
    Raises MissingError."""
    with ask.reading() as connection:
        kept = stored_statistics(connection, checkpoint_id, ask.visible)
        if kept is None or kept.is_stale:
            return None
        found = find_item(connection, kept.document_id, "tensors", "fqn", fqn)
    if found is None:
        return None
    values = found["fqn"], found["dtype"], tuple(found["shape"]), found["statistics"]
    return MeasuredTensor(*values, is_kept=True, computed_at=kept.created_at)
