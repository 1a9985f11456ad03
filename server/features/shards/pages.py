"""Which rank holds what: the map of a checkpoint's shards, and its chunks one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.core.answers import IdPath
from dcp.server.core.data.access import DataAccess, DataDep
from dcp.server.core.http.dependencies import Caller, Db
from dcp.server.core.pages.queries import READ, pages_router, query_of
from dcp.server.core.pages.rendering import page
from dcp.server.core.security.principal import Principal
from dcp.server.features.checkpoints import api as checkpoints_api
from dcp.server.features.checkpoints.answers import CheckpointDetailAnswer
from dcp.server.features.shards import api as shards_api
from dcp.server.features.shards.answers import ShardMapQuery, StoredChunksQuery
from dcp.server.features.shards.sentences import balance_of
from dcp.server.records.drawings import ShardMap

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


@dataclass(frozen=True, slots=True)
class ViewedShards:
    """The part of a checkpoint's shards that is looked at, and who asks for it how."""

    found: CheckpointDetailAnswer
    view: ShardsView
    request: Request
    data: DataAccess
    caller: Principal

    def is_late(self, *, with_boxes: bool = False) -> bool:
        """As `is_late`."""
        waits = self.view.wait
        return is_late(self.found, self.request, self.data, self.caller, waits=waits, with_boxes=with_boxes)

    def page(self, template: str, twin: str, **values: Any) -> Response:
        """The page, beside the JSON at ``twin`` below the shards of the API."""
        query = f"?{urlencode(self.view.part)}" if self.view.part else ""
        path = f"/api/v1/checkpoints/{self.found.id}/shards/{twin}{query}"
        return page(self.request, template, twin=path, found=self.found, view=self.view, **values)


def _part(
    checkpoint_id: IdPath,
    view: Annotated[ShardsView, Query()],
    request: Request,
    database: Db,
    data: DataDep,
    caller: Caller,
) -> ViewedShards:
    found = checkpoints_api.get_checkpoint(checkpoint_id, database, caller, Response())
    return ViewedShards(found, view, request, data, caller)


ViewedShardsDep = Annotated[ViewedShards, Depends(_part)]


@router.get("/checkpoints/{checkpoint_id}/shards", dependencies=READ)
def shards_page(part: ViewedShardsDep) -> Response:
    """The map, drawn by a script that asks for finer bins; what each rank wrote, in words and as a table."""
    shown = None if part.is_late() else _map(part)
    is_whole = not part.view.part
    return part.page(
        "shards.html",
        "map",
        is_late=shown is None,
        map=shown,
        balance=None if shown is None else balance_of(shown, part.found.world_size, is_whole=is_whole),
    )


@router.get("/checkpoints/{checkpoint_id}/shards/chunks", dependencies=READ)
def chunks_page(part: ViewedShardsDep) -> Response:
    """The same as a table: tensors, boxes, places."""
    chunks = None
    if not part.is_late(with_boxes=True):
        query = query_of(StoredChunksQuery, **part.view.part, limit=_CHUNKS, cursor=part.view.cursor)
        chunks = shards_api.list_stored_chunks(part.found.id, query, part.data, part.caller)
    return part.page(
        "chunks.html",
        "chunks",
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


def _map(part: ViewedShards) -> ShardMap:
    from dcp.server.features.shards.shard_map import shard_map  # only here, as all that reads checkpoints

    query = query_of(ShardMapQuery, **part.view.part, rows=_ROWS, bins=1)
    query.check()
    return shard_map(part.data.chunks(part.found.id, part.caller).columns, **query.model_dump())
