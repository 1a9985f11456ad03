"""Which rank holds what: the map of a checkpoint's shards, and its chunks one by one."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.data.access import DataAccess, DataDep
from dcp.server.http.dependencies import Caller, Db
from dcp.server.pages.queries import READ, pages_router
from dcp.server.pages.rendering import page
from dcp.server.pages.sentences import balance_of
from dcp.server.records.drawings import ShardMap
from dcp.server.routes.catalog import checkpoints as checkpoints_api
from dcp.server.routes.data import shards as shards_api
from dcp.server.schemas.checkpoints import CheckpointDetailAnswer
from dcp.server.schemas.common import IdPath
from dcp.server.schemas.drawings import ShardMapQuery, StoredChunksQuery
from dcp.server.security.principal import Principal

__all__ = ["router"]

router = pages_router()

_ROWS: Final = 64
_CHUNKS: Final = 100
_LARGE: Final = 500_000
"""Chunks: to read the index of so many takes longer than anybody waits for a page."""

_Rank = Annotated[int, Field(ge=0, lt=1 << 31)]
_Offset = Annotated[int, Field(ge=0, lt=1 << 62)]


class ShardsView(BaseModel):
    """Which part of the map: ranks, bytes of their files, tensors that have ``glob`` in their names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_rank: _Rank | None = None
    last_rank: _Rank | None = None
    begin: _Offset = 0
    end: _Offset | None = None
    glob: Annotated[str, Field(max_length=254)] | None = None
    colour: Literal["layer", "dtype", "bytes"] = "layer"
    wait: Annotated[bool, Field(description="Also where it takes long.")] = False
    cursor: Annotated[str, Field(max_length=4096)] | None = None

    @property
    def part(self) -> dict[str, Any]:
        """As the API is asked for it."""
        given = self.model_dump(include={"first_rank", "last_rank", "begin", "end"}, exclude_none=True)
        given = {name: value for name, value in given.items() if value or name != "begin"}
        return given | ({"glob": f"*{self.glob}*"} if self.glob else {})


@router.get("/checkpoints/{checkpoint_id}/shards", dependencies=READ)
def shards_page(
    checkpoint_id: IdPath,
    view: Annotated[ShardsView, Query()],
    request: Request,
    database: Db,
    data: DataDep,
    caller: Caller,
) -> Response:
    """The map, drawn by a script that asks for finer bins; what each rank wrote, in words and as a table."""
    found = checkpoints_api.get_checkpoint(checkpoint_id, database, caller, Response())
    shown = None
    if not is_late(found, request, data, caller, waits=view.wait):
        shown = _map(checkpoint_id, ShardMapQuery(**view.part, rows=_ROWS, bins=1), data, caller)
    path = f"/api/v1/checkpoints/{checkpoint_id}/shards/map"
    return page(
        request,
        "shards.html",
        twin=f"{path}?{urlencode(view.part)}" if view.part else path,
        found=found,
        view=view,
        is_late=shown is None,
        map=shown,
        balance=None if shown is None else balance_of(shown, found.world_size, is_whole=not view.part),
    )


@router.get("/checkpoints/{checkpoint_id}/shards/chunks", dependencies=READ)
def chunks_page(
    checkpoint_id: IdPath,
    view: Annotated[ShardsView, Query()],
    request: Request,
    database: Db,
    data: DataDep,
    caller: Caller,
) -> Response:
    """The same as a table: tensors, boxes, places."""
    found = checkpoints_api.get_checkpoint(checkpoint_id, database, caller, Response())
    chunks = None
    if not is_late(found, request, data, caller, waits=view.wait, with_boxes=True):
        query = StoredChunksQuery(**view.part, limit=_CHUNKS, cursor=view.cursor)
        chunks = shards_api.list_stored_chunks(checkpoint_id, query, data, caller)
    path = f"/api/v1/checkpoints/{checkpoint_id}/shards/chunks"
    return page(
        request,
        "chunks.html",
        twin=f"{path}?{urlencode(view.part)}" if view.part else path,
        found=found,
        view=view,
        is_late=chunks is None,
        chunks=[] if chunks is None else chunks.items,
        next_cursor=None if chunks is None else chunks.next_cursor,
    )


def is_late(
    found: CheckpointDetailAnswer,
    request: Request,
    data: DataAccess,
    caller: Principal,
    *,
    waits: bool,
    with_boxes: bool = False,
) -> bool:
    """Whether what is in the index is to follow the page, since reading it would take long: not for whoever
    ``waits``, and not for the request that the page itself makes then."""
    is_large = (found.tensor_count or 0) * (found.world_size or 1) > _LARGE
    if not is_large or waits or "hx-request" in request.headers:
        return False
    return with_boxes or not data.has_chunks(found.id, caller)


def _map(checkpoint_id: int, query: ShardMapQuery, data: DataAccess, caller: Principal) -> ShardMap:
    from dcp.server.data.drawings.shard_map import shard_map  # only here, as all that reads checkpoints

    query.check()
    return shard_map(data.chunks(checkpoint_id, caller).columns, **query.model_dump())
