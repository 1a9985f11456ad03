"""Chunks of a checkpoint: columns sorted by rank, file, and position; and lists.

Columns take a quarter of the index's memory, so they stay in memory longer. Sorting allows bisection among
millions of chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.server.catalog.inputs import clean_text
from dcp.server.features.shards import Chunk, RankShare, ShardedTensor, StoredChunk
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex

NO_RANK: Final = np.iinfo(np.int64).max
"""Rank of files without a rank in their names; sorts last."""
_MAX_CHUNKS: Final = 4096
"""Listed chunks per tensor."""
_MAX_COMPARED: Final = 1 << 16
"""Chunks per tensor with compared boxes."""
_NAME_BYTES: Final = 80
_RANK_FILE: Final = re.compile(r"__([0-9]{1,9})_[0-9]+(?:\.[0-9A-Za-z-]+)?\.distcp")

Int64 = npt.NDArray[np.int64]
Unsigned = npt.NDArray[np.unsignedinteger[Any]]


def _rank_of(file: str) -> int | None:
    """Return the rank of a file from its name in checkpoints of dcp or stock DCP."""
    match = _RANK_FILE.fullmatch(file)
    return None if match is None else int(match[1])


class ChunkColumns:
    """Files by rank: ``ranks``, ``files``, ``file_sizes``, ``file_ends`` (end of the last payload).

    The chunks of file i are ``starts[i]:starts[i + 1]``, sorted by position: ``begins``, ``lengths``,
    ``tensors``, and ``rows`` of the index. By tensor: ``fqns``, ``dtype_codes``, ``stored_bytes``, and
    ``is_replicated`` (more stored bytes than elements).
    """

    def __init__(self, index: CheckpointIndex) -> None:
        known = map(_rank_of, index.files)
        ranks = np.array([NO_RANK if rank is None else rank for rank in known], np.int64)
        by_rank = np.argsort(ranks, kind="stable")
        place = np.empty(len(ranks), _unsigned(len(ranks)))
        place[by_rank] = np.arange(len(ranks))
        places = place[index.chunk_files]
        begins = np.where(index.payload_offsets == UNKNOWN, index.record_offsets, index.payload_offsets)
        rows = _sorted(places, begins)
        lengths = index.payload_lengths[rows]
        counts = np.bincount(places, minlength=len(ranks))
        self.ranks = ranks[by_rank]
        self.files = tuple(index.files[file] for file in by_rank.tolist())
        self.file_sizes = index.file_sizes[by_rank]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.begins: Int64 = begins[rows]
        self.file_ends = _greatest(self.begins + lengths, self.starts)
        self.lengths = lengths.astype(_unsigned(int(lengths.max(initial=0))))
        self.tensors = index.chunk_tensors[rows].astype(_unsigned(index.tensor_count))
        self.rows = rows.astype(_unsigned(index.chunk_count))
        self.fqns = index.fqns
        self.dtype_codes = index.dtype_codes
        stored = np.concatenate([[0], np.cumsum(index.payload_lengths)])[index.chunk_start]
        self.stored_bytes: Int64 = np.diff(stored)
        self.is_replicated = self.stored_bytes > _whole_bytes(index)

    @property
    def held_bytes(self) -> int:
        """The approximate memory of the columns."""
        columns = (self.begins, self.lengths, self.tensors, self.rows)
        return sum(column.nbytes for column in columns) + _NAME_BYTES * (len(self.fqns) + 3 * len(self.files))

    def files_of(self, first_rank: int | None, last_rank: int | None) -> range:
        """Return the files of the ranks; without bounds, also files without a rank."""
        if first_rank is None and last_rank is None:
            return range(len(self.files))
        begin = 0 if first_rank is None else int(np.searchsorted(self.ranks, first_rank))
        last = NO_RANK - 1 if last_rank is None else last_rank
        return range(begin, max(begin, int(np.searchsorted(self.ranks, last, "right"))))

    def matching(self, glob: str | None) -> npt.NDArray[np.bool_] | None:
        """Return for each tensor if its name matches; None: all names match."""
        if glob is None:
            return None
        return np.array([fnmatchcase(fqn, glob) for fqn in self.fqns], bool)


def _sorted(places: Unsigned, begins: Int64) -> Int64:
    """Return the order by file and position. Writers go through tensors in order, so sorting by file is often
    enough, and fast below 65,536 files."""
    order = np.argsort(places, kind="stable")
    falls = np.diff(begins[order]) < 0
    if (falls & (np.diff(places[order].astype(np.int64)) == 0)).any():
        order = np.lexsort((begins, places))
    return order


def _greatest(values: Int64, starts: Int64) -> Int64:
    """Return the maximum of each group of values; 0 for empty groups."""
    found = np.zeros(len(starts) - 1, np.int64)
    filled = np.flatnonzero(np.diff(starts))
    if len(filled):
        found[filled] = np.maximum.reduceat(values, starts[filled])
    return found


def _whole_bytes(index: CheckpointIndex) -> Int64:
    """Return the bytes of each whole tensor."""
    shapes = (index.shape(row) for row in range(index.tensor_count))
    return np.array([np.prod(shape, dtype=np.int64) for shape in shapes], np.int64) * index.itemsizes


def _unsigned(greatest: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.min_scalar_type(max(1, greatest))


# -- lists ---------------------------------------------------------------------------------------------------


def rank_shares(index: CheckpointIndex) -> list[RankShare]:
    """Return shares by rank; the share of files without a rank is last."""
    ranks = [_rank_of(name) for name in index.files]
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
    """Return tensors after ``after_row`` with matching names, with their rows, in index order."""
    ranks = [_rank_of(name) for name in index.files]
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
    """Return up to ``limit`` chunks of `shard_map` after the position ``after``, with their positions."""
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
    """Return the number of stored copies of the box; None for a tensor with too many chunks."""
    chunks = index.chunks(tensor)
    if len(chunks) > _MAX_COMPARED:
        return None
    values = slice(int(index.box_start[chunks.start]), int(index.box_start[chunks.stop]))
    same = np.ones(len(chunks), bool)
    for column in (index.chunk_offsets, index.chunk_sizes):
        boxes = column[values].reshape(len(chunks), -1)
        same &= (boxes == boxes[chunk - chunks.start]).all(axis=1)
    return int(same.sum())
