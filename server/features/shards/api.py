"""Shards in the API: their map, and lists of ranks, tensors and chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from dcp.server.catalog.cursors import encode_cursor, offset_of, query_mark
from dcp.server.catalog.name_patterns import check_pattern
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.data.opening import Stamped
from dcp.server.core.data.responses import NOT_MODIFIED
from dcp.server.core.data.sharing import SharedValues
from dcp.server.core.http.dependencies import MAX_PAGE
from dcp.server.core.http.dependencies import Page as PageQuery
from dcp.server.core.inputs import Text
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.shards import feature
from dcp.server.records.contents import RankShare, ShardedTensor, StoredChunk
from dcp.server.records.drawings import ShardMap
from dcp.server.records.lists import Page

__all__ = ["KeptChunks", "Rank", "ShardMapQuery", "StoredChunksQuery", "list_stored_chunks", "map_of"]

Rank = Annotated[int, Field(ge=0, lt=1 << 31)]
_Offset = Annotated[int, Field(ge=0, lt=1 << 62)]
_SHARDS: Final = "/checkpoints/{checkpoint_id}/shards"
_ERRORS: Final = (400, 401, 403, 404, 409, 410, 421, 422, 429, 503)
_PAGE_CHUNKS: Final = 20_000


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    first_rank: Rank | None = None
    last_rank: Rank | None = None
    begin: Annotated[_Offset, Field(description="The first byte of each file.")] = 0
    end: Annotated[_Offset, Field(description="Behind the last byte; that of the longest file.")] | None = (
        None
    )
    glob: Annotated[Text, StringConstraints(min_length=1, max_length=256)] | None = None

    def check(self) -> None:
        """Raise UnprocessableError or InvalidQueryError for a part that cannot be meant."""
        if self.end is not None and self.end <= self.begin:
            raise UnprocessableError("the end is not behind the begin", field="end")
        if self.glob is not None:
            check_pattern("glob", self.glob)


class ShardMapQuery(_Part):
    """The ranks, bytes and tensors of a map, and the number of its cells."""

    rows: Annotated[int, Field(ge=1, le=512, description="As many rows of files at most.")] = 128
    bins: Annotated[int, Field(ge=1, le=512, description="As many bins of bytes at most.")] = 64


class StoredChunksQuery(_Part):
    """The ranks, bytes and tensors of a list of chunks."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE, description="Rows of a page at most.")] = 50
    cursor: (
        Annotated[
            str, Field(min_length=1, max_length=4096, description="The next_cursor of the page before.")
        ]
        | None
    ) = None


@dataclass(frozen=True, eq=False)
class OpenChunks(Stamped):
    """The chunks of a checkpoint, and what its writer noted of the save."""

    columns: Any
    provenance: Mapping[str, Any]

    @property
    def held_bytes(self) -> int:
        """About how much memory they take."""
        return int(self.columns.held_bytes)


class KeptChunks:
    """The chunks of the checkpoints that were looked at last, also of those whose indexes are too large to
    be kept: ``service.own(KeptChunks)``."""

    def __init__(self, _service: object) -> None:
        # five million chunks take 90 MiB
        self._values = SharedValues[Stamped, OpenChunks](count=16, kept_bytes=128 << 20)

    def has(self, ask: Ask, checkpoint_id: int) -> bool:
        """Whether `get` answers at once. Raises as `Data.open` does."""
        return self._values.find(ask.data.find(checkpoint_id).state) is not None

    def get(self, ask: Ask, checkpoint_id: int) -> OpenChunks:
        """The chunks of a checkpoint. Raises as `Data.open` does."""
        state = ask.data.find(checkpoint_id).state
        return self._values.get(state, lambda: self._read(ask, checkpoint_id))

    def _read(self, ask: Ask, checkpoint_id: int) -> OpenChunks:
        from dcp.server.features.shards.columns import ChunkColumns  # only here, as all that needs numpy

        opened = ask.data.open(checkpoint_id).opened
        columns = ChunkColumns.of(opened.index)
        return OpenChunks(opened.root, opened.key, opened.stamp, columns, opened.index.provenance)


@feature.get(_SHARDS, tag="data", errors=_ERRORS)
def list_shards(
    checkpoint_id: IdPath,
    ask: Ask,
    page: PageQuery,
    glob: Annotated[str | None, Query(min_length=1, max_length=256, examples=["layers.*.weight"])] = None,
) -> Page[ShardedTensor]:
    """Tensors with the boxes that they are cut into, and the rank and file of each.

    A page ends early where its tensors have many chunks.
    """
    from dcp.server.features.shards.listing import sharded_tensors

    opened = ask.data.open(checkpoint_id).opened
    mark = query_mark("shards", checkpoint_id, opened.stamp, glob)
    after = offset_of(page.cursor, mark, -1)
    shown: list[ShardedTensor] = []
    chunks = 0
    for row, tensor in sharded_tensors(opened.index, after_row=after, glob=glob):
        if len(shown) == page.limit or (shown and chunks + len(tensor.chunks) > _PAGE_CHUNKS):
            return Page(tuple(shown), encode_cursor(mark, after))
        shown.append(tensor)
        after = row
        chunks += len(tensor.chunks)
    return Page(tuple(shown), None)


@feature.get(_SHARDS + "/ranks", tag="data", errors=_ERRORS)
def list_rank_shares(checkpoint_id: IdPath, ask: Ask, page: PageQuery) -> Page[RankShare]:
    """How much each rank wrote."""
    from dcp.server.features.shards.listing import rank_shares

    opened = ask.data.open(checkpoint_id).opened
    mark = query_mark("ranks", checkpoint_id, opened.stamp)
    begin = offset_of(page.cursor, mark)
    shares, end = rank_shares(opened.index), begin + page.limit
    return Page(tuple(shares[begin:end]), encode_cursor(mark, end) if end < len(shares) else None)


@feature.get(_SHARDS + "/map", tag="data", errors=(412, *_ERRORS), responses=NOT_MODIFIED)
def get_shard_map(checkpoint_id: IdPath, query: Annotated[ShardMapQuery, Query()], ask: Ask) -> ShardMap:
    """Which rank holds what, and where: rows of files by rank, bins of bytes, the largest tensor in each."""
    query.check()
    found = ask.service.own(KeptChunks).get(ask, checkpoint_id)
    ask.tag(found.etag("map", query))
    return map_of(found, query)


def map_of(found: OpenChunks, query: ShardMapQuery) -> ShardMap:
    """The map of the part that ``query`` names."""
    from dcp.server.features.shards.shard_map import shard_map  # only here, as all that needs numpy

    return shard_map(found.columns, **query.model_dump())


@feature.get(_SHARDS + "/chunks", tag="data", errors=_ERRORS)
def list_stored_chunks(
    checkpoint_id: IdPath, query: Annotated[StoredChunksQuery, Query()], ask: Ask
) -> Page[StoredChunk]:
    """Chunks of the map one by one, by rank, file and place, and in how many copies."""
    from dcp.server.features.shards.listing import stored_chunks

    query.check()
    found = ask.service.own(KeptChunks).get(ask, checkpoint_id)
    part = query.model_dump(exclude={"limit", "cursor"})
    mark = query_mark("chunks", checkpoint_id, found.stamp, sorted(part.items(), key=str))
    after = offset_of(query.cursor, mark, -1)
    index = ask.data.open(checkpoint_id).opened.index
    chunks = stored_chunks(found.columns, index, after=after, limit=query.limit + 1, **part)
    shown = tuple(chunk for _, chunk in chunks[: query.limit])
    is_last = len(chunks) == len(shown)
    return Page(shown, None if is_last else encode_cursor(mark, chunks[query.limit - 1][0]))
