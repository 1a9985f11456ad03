"""Lists of ranks, tensors and chunks: who wrote what, from the index alone."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice
from typing import Final

import numpy as np

from dcp.server.catalog.values import clean_text
from dcp.server.features.shards.columns import NO_RANK, ChunkColumns, rank_of
from dcp.server.records.contents import Chunk, RankShare, ShardedTensor, StoredChunk
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex

__all__ = ["rank_shares", "sharded_tensors", "stored_chunks"]

_MAX_CHUNKS: Final = 4096
"""Chunks of one tensor that are listed."""
_MAX_COMPARED: Final = 1 << 16
"""Chunks of a tensor whose boxes are compared."""


def rank_shares(index: CheckpointIndex) -> list[RankShare]:
    """The shares by rank; that of files without a rank is the last."""
    ranks = [rank_of(name) for name in index.files]
    order = sorted(set(ranks), key=lambda rank: (rank is None, rank or 0))
    places = {rank: place for place, rank in enumerate(order)}
    by_file = np.array([places[rank] for rank in ranks], np.int64)
    by_chunk = by_file[index.chunk_files]
    sizes = np.zeros(len(order), np.int64)
    np.add.at(sizes, by_chunk, index.payload_lengths)
    pairs = np.unique(by_chunk * max(1, index.tensor_count) + index.chunk_tensors)
    chunks = np.bincount(by_chunk, minlength=len(order)).tolist()
    tensors = np.bincount(pairs // max(1, index.tensor_count), minlength=len(order)).tolist()
    shares = []
    for place, rank in enumerate(order):
        own = index.file_sizes[by_file == place]
        file_bytes = None if (own == UNKNOWN).any() else int(own.sum())
        shares.append(RankShare(rank, len(own), file_bytes, chunks[place], tensors[place], int(sizes[place])))
    return shares


def sharded_tensors(
    index: CheckpointIndex, *, after_row: int = -1, glob: str | None = None
) -> Iterator[tuple[int, ShardedTensor]]:
    """Tensors after ``after_row`` whose names match ``glob``, with their rows, in the order of the index."""
    ranks = [rank_of(name) for name in index.files]
    for row in range(after_row + 1, index.tensor_count):
        fqn = index.fqns[row]
        if glob is not None and not fnmatchcase(fqn, glob):
            continue
        chunks = index.chunks(row)
        listed = tuple(_chunk(index, chunk, ranks) for chunk in chunks[:_MAX_CHUNKS])
        yield (
            row,
            ShardedTensor(clean_text(fqn), index.dtype(row).name, index.shape(row), len(chunks), listed),
        )


def _chunk(index: CheckpointIndex, chunk: int, ranks: list[int | None]) -> Chunk:
    file = int(index.chunk_files[chunk])
    offsets, sizes = index.box(chunk)
    at = int(index.payload_offsets[chunk])
    return Chunk(
        ranks[file],
        clean_text(index.files[file]),
        offsets,
        sizes,
        int(index.payload_lengths[chunk]),
        None if at == UNKNOWN else at,
    )


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
    """Up to ``limit`` of the chunks that `shard_map` sums, after the place ``after``, with their places."""
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
    """The number of times that its box is stored; None where its tensor has too many chunks to compare."""
    chunks = index.chunks(tensor)
    if len(chunks) > _MAX_COMPARED:
        return None
    values = slice(int(index.box_start[chunks.start]), int(index.box_start[chunks.stop]))
    same = np.ones(len(chunks), bool)
    for column in (index.chunk_offsets, index.chunk_sizes):
        boxes = column[values].reshape(len(chunks), -1)
        same &= (boxes == boxes[chunk - chunks.start]).all(axis=1)
    return int(same.sum())
