"""``/checkpoints/{id}/shards``: which rank holds what."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from fastapi import Query

from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.data.access import DataDep
from dcp.server.core.http.dependencies import Caller, Page, requires
from dcp.server.core.http.routers import api_router
from dcp.server.features.shards.answers import StoredChunksQuery
from dcp.server.features.tensors.answers import (
    RankShareAnswer,
    RankShareList,
    ShardedTensorAnswer,
    ShardPage,
    StoredChunkAnswer,
    StoredChunkPage,
)

__all__ = ["router"]

router = api_router("/checkpoints/{checkpoint_id}/shards", tags=["data"], dependencies=[requires("read")])

_PROBLEMS = problems(400, 401, 403, 404, 409, 410, 421, 422, 429, 503)
_PAGE_CHUNKS = 20_000


@router.get("", responses=_PROBLEMS)
def list_shards(
    checkpoint_id: IdPath,
    data: DataDep,
    caller: Caller,
    page: Page,
    glob: Annotated[str | None, Query(min_length=1, max_length=256, examples=["layers.*.weight"])] = None,
) -> ShardPage:
    """Tensors with the boxes that they are cut into, and the rank and file of each.

    A page ends early where its tensors have many chunks.
    """
    from dcp.server.core.data.shards import sharded_tensors  # only here, as all that reads tensors

    opened = data.open(checkpoint_id, caller).opened
    mark = query_mark("shards", checkpoint_id, opened.stamp, glob)
    after = max(-1, decode_cursor(page.cursor, mark, int)[0]) if page.cursor is not None else -1
    shown: list[ShardedTensorAnswer] = []
    chunks = 0
    for row, tensor in sharded_tensors(opened.index, after_row=after, glob=glob):
        if len(shown) == page.limit or (shown and chunks + len(tensor.chunks) > _PAGE_CHUNKS):
            return ShardPage(items=shown, next_cursor=encode_cursor(mark, after))
        shown.append(ShardedTensorAnswer.of(tensor))
        after = row
        chunks += len(tensor.chunks)
    return ShardPage(items=shown, next_cursor=None)


@router.get("/ranks", responses=_PROBLEMS)
def list_rank_shares(checkpoint_id: IdPath, data: DataDep, caller: Caller, page: Page) -> RankShareList:
    """How much each rank wrote."""
    from dcp.server.core.data.shards import rank_shares

    opened = data.open(checkpoint_id, caller).opened
    mark = query_mark("ranks", checkpoint_id, opened.stamp)
    begin = max(0, decode_cursor(page.cursor, mark, int)[0]) if page.cursor is not None else 0
    shares = rank_shares(opened.index)
    end = begin + page.limit
    return RankShareList(
        items=[RankShareAnswer.of(share) for share in islice(shares, begin, end)],
        next_cursor=encode_cursor(mark, end) if end < len(shares) else None,
    )


@router.get("/chunks", responses=_PROBLEMS)
def list_stored_chunks(
    checkpoint_id: IdPath, query: Annotated[StoredChunksQuery, Query()], data: DataDep, caller: Caller
) -> StoredChunkPage:
    """Chunks of the map one by one, by rank, file and place, and in how many copies."""
    from dcp.server.features.shards.chunk_list import stored_chunks

    query.check()
    found = data.chunks(checkpoint_id, caller)
    view = query.model_dump(exclude={"limit", "cursor"})
    mark = query_mark("chunks", checkpoint_id, found.stamp, sorted(view.items(), key=str))
    after = max(-1, decode_cursor(query.cursor, mark, int)[0]) if query.cursor is not None else -1
    index = data.open(checkpoint_id, caller).opened.index
    chunks = stored_chunks(found.columns, index, after=after, limit=query.limit + 1, **view)
    shown = chunks[: query.limit]
    return StoredChunkPage(
        items=[StoredChunkAnswer.of(chunk) for _, chunk in shown],
        next_cursor=encode_cursor(mark, shown[-1][0]) if len(chunks) > len(shown) else None,
    )
