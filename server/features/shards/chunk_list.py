"""The chunks of a part of a map, one by one: in the order of ranks, files and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import numpy as np

from dcp.server.catalog.values import clean_text
from dcp.server.core.data.chunk_columns import NO_RANK, ChunkColumns
from dcp.server.records.contents import StoredChunk
from dcp.storage.formats.index import CheckpointIndex

__all__ = ["stored_chunks"]

_MAX_COMPARED: Final = 1 << 16
"""Chunks of a tensor whose boxes are compared."""


def stored_chunks(
    columns: ChunkColumns,
    index: CheckpointIndex,
    *,
    limit: int,
    after: int = -1,
    first_rank: int | None = None,
    last_rank: int | None = None,
    begin: int = 0,
    end: int | None = None,
    glob: str | None = None,
) -> list[tuple[int, StoredChunk]]:
    """Up to ``limit`` of those that `shard_map` adds up, behind the place ``after``, with their places."""
    matching = columns.matching(glob)
    places = (
        place
        for file in columns.files_of(first_rank, last_rank)
        for place in _of_file(columns, file, after, begin, end, matching)
    )
    files = np.searchsorted(columns.starts, chosen := list(islice(places, limit)), "right") - 1
    return [
        (place, _stored(columns, index, place, file))
        for place, file in zip(chosen, files.tolist(), strict=True)
    ]


def _of_file(
    columns: ChunkColumns,
    file: int,
    after: int,
    begin: int,
    end: int | None,
    matching: np.ndarray[tuple[int], np.dtype[np.bool_]] | None,
) -> Iterator[int]:
    first = max(int(columns.starts[file]), after + 1)
    some = slice(first, max(first, int(columns.starts[file + 1])))
    begins = columns.begins[some]
    own = (begins >= begin) | (begins + columns.lengths[some].astype(np.int64) > begin)
    if end is not None:
        own &= begins < end
    if matching is not None:
        own &= matching[columns.tensors[some]]
    return iter((first + np.flatnonzero(own)).tolist())


def _stored(columns: ChunkColumns, index: CheckpointIndex, place: int, file: int) -> StoredChunk:
    chunk, tensor = int(columns.rows[place]), int(columns.tensors[place])
    rank = int(columns.ranks[file])
    offsets, sizes = index.box(chunk)
    return StoredChunk(
        fqn=clean_text(columns.fqns[tensor]),
        dtype=index.dtype(tensor).name,
        rank=None if rank == NO_RANK else rank,
        file=clean_text(columns.files[file]),
        file_offset=int(columns.begins[place]),
        bytes=int(columns.lengths[place]),
        offsets=offsets,
        sizes=sizes,
        copies=_copies(index, tensor, chunk),
    )


def _copies(index: CheckpointIndex, tensor: int, chunk: int) -> int | None:
    """How often its box is stored."""
    chunks = index.chunks(tensor)
    if len(chunks) > _MAX_COMPARED:
        return None
    values = slice(int(index.box_start[chunks.start]), int(index.box_start[chunks.stop]))
    same = np.ones(len(chunks), bool)
    for column in (index.chunk_offsets, index.chunk_sizes):
        boxes = column[values].reshape(len(chunks), -1)
        same &= (boxes == boxes[chunk - chunks.start]).all(axis=1)
    return int(same.sum())
