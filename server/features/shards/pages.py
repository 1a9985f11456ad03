"""Pages of shards: the map of a checkpoint, and its chunks as a table."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.catalog.details import CheckpointDetail, get_checkpoint
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.pages.formatting import bytes_text, count_text, times_text
from dcp.server.core.pages.queries import query_of
from dcp.server.features.shards import feature
from dcp.server.features.shards.api import (
    KeptChunks,
    Rank,
    ShardMapQuery,
    StoredChunksQuery,
    list_stored_chunks,
    map_of,
)
from dcp.server.records.drawings import ShardMap

__all__ = ["is_late"]

_ROWS: Final = 64
_CHUNKS: Final = 100
_LARGE: Final = 500_000
"""Chunks: reading the index of so many takes too long for a page."""
_SAME: Final = 1.005
_EVEN: Final = 1.05
"""Of the mean: less is no imbalance."""

_Offset = Annotated[int, Field(ge=0, lt=1 << 62)]


class ShardsView(BaseModel):
    """The shown part of the map: ranks, bytes of their files, tensors with ``glob`` in their names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_rank: Rank | None = None
    last_rank: Rank | None = None
    begin: _Offset = 0
    end: _Offset | None = None
    glob: Annotated[str, Field(max_length=254)] | None = None
    colour: Literal["layer", "dtype", "bytes"] = "layer"
    wait: Annotated[bool, Field(description="Also where it takes long.")] = False
    cursor: Annotated[str, Field(max_length=4096)] | None = None

    @property
    def part(self) -> dict[str, Any]:
        """The part, as the query of the API names it."""
        given = self.model_dump(include={"first_rank", "last_rank", "begin", "end"}, exclude_none=True)
        given = {name: value for name, value in given.items() if value or name != "begin"}
        return given | ({"glob": f"*{self.glob}*"} if self.glob else {})

    def values(self, found: CheckpointDetail, path: str) -> dict[str, Any]:
        """The values that both pages have, with the JSON of the part at ``path`` below the shards."""
        query = f"?{urlencode(self.part)}" if self.part else ""
        return {"found": found, "view": self, "twin": f"/api/v1/checkpoints/{found.id}/shards/{path}{query}"}


@feature.page("/checkpoints/{checkpoint_id}/shards", "shards.html")
def shards_page(checkpoint_id: IdPath, view: Annotated[ShardsView, Query()], ask: Ask) -> dict[str, Any]:
    """The map, drawn by a script that loads finer bins; the bytes of each rank, as text and as a table."""
    found = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    shown = None
    if not is_late(ask, found, waits=view.wait):
        query = query_of(ShardMapQuery, **view.part, rows=_ROWS, bins=1)
        query.check()
        shown = map_of(ask.service.own(KeptChunks).get(ask, checkpoint_id), query)
    return {
        **view.values(found, "map"),
        "is_late": shown is None,
        "map": shown,
        "balance": None if shown is None else _balance(shown, found.world_size, is_whole=not view.part),
    }


@feature.page("/checkpoints/{checkpoint_id}/shards/chunks", "chunks.html")
def chunks_page(checkpoint_id: IdPath, view: Annotated[ShardsView, Query()], ask: Ask) -> dict[str, Any]:
    """The chunks as a table: tensors, boxes, places."""
    found = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    chunks = None
    if not is_late(ask, found, waits=view.wait, with_boxes=True):
        query = query_of(StoredChunksQuery, **view.part, limit=_CHUNKS, cursor=view.cursor)
        chunks = list_stored_chunks(found.id, query, ask)
    return {
        **view.values(found, "chunks"),
        "is_late": chunks is None,
        "chunks": chunks.items if chunks else (),
        "next_cursor": chunks.next_cursor if chunks else None,
    }


def is_late(ask: Ask, found: CheckpointDetail, *, waits: bool, with_boxes: bool = False) -> bool:
    """Whether the content of the index is to follow the page, because reading it takes long: not with
    ``waits``, and not in the request by which the page loads it."""
    is_large = (found.tensor_count or 0) * (found.world_size or 1) > _LARGE
    if not is_large or waits or "hx-request" in ask.request.headers:
        return False
    return with_boxes or not ask.service.own(KeptChunks).has(ask, found.id)


def _balance(found: ShardMap, world_size: int | None, *, is_whole: bool) -> list[str]:
    """Sentences on the bytes of the ranks; on ranks that wrote nothing only where the map is whole."""
    if found.largest_rank is None or not found.mean_rank_bytes:
        return ["The file names do not show which rank wrote them."] if found.rows else []
    sentences = [_share(found)]
    silent = (world_size or 0) - found.rank_count
    if is_whole and silent > 0:
        sentences.append(f"{count_text(silent)} of {count_text(world_size)} ranks wrote nothing.")
    replicated = sum(row.replicated_bytes for row in found.rows)
    if replicated:
        sentences.append(f"{bytes_text(replicated)} belong to tensors that are stored more than once.")
    return sentences


def _share(found: ShardMap) -> str:
    mean, ratio = bytes_text(found.mean_rank_bytes), found.largest_rank_bytes / found.mean_rank_bytes
    if found.rank_count == 1:
        return f"Rank {found.largest_rank} wrote all of it, {bytes_text(found.largest_rank_bytes)}."
    if ratio < _SAME:
        return f"All {count_text(found.rank_count)} ranks wrote the same amount: {mean}."
    if ratio < _EVEN:
        return f"All ranks wrote about the same amount: {mean} each, at most {times_text(ratio)} times that."
    return (
        f"Rank {found.largest_rank} wrote {times_text(ratio)} times the mean: "
        f"{bytes_text(found.largest_rank_bytes)}; the mean is {mean}."
    )
