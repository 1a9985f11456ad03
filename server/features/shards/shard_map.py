"""Maps of shards: the bytes of each rank in as many cells as can be drawn, rows of files and bins of bytes.

Some million chunks are summed as columns, without an object for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.server.catalog.inputs import clean_text
from dcp.server.catalog.names import layer_number
from dcp.server.features.shards import ShardMap, ShardMapRow
from dcp.server.features.shards.chunks import NO_RANK, ChunkColumns
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import UNKNOWN

MAX_CELLS: Final = 1 << 15
_BLOCK: Final = 1 << 19
"""Chunks summed at a time, in at least one file."""
_MAX_KEY: Final = 1 << 62

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def shard_map(
    columns: ChunkColumns,
    *,
    rows: int = 128,
    bins: int = 64,
    first_rank: int | None = None,
    last_rank: int | None = None,
    begin: int = 0,
    end: int | None = None,
    glob: str | None = None,
) -> ShardMap:
    """Return the files of ranks ``first_rank`` to ``last_rank`` in at most ``rows`` rows, and the bytes
    ``begin`` to ``end`` (default: of the longest file) in ``bins`` bins, for tensors with names that match
    ``glob``. Rows times bins are at most `MAX_CELLS`."""
    files = columns.files_of(first_rank, last_rank)
    own = slice(files.start, files.stop)
    if end is None:
        sizes = (columns.file_sizes[own], columns.file_ends[own])
        end = max(begin + 1, *(int(column.max(initial=0)) for column in sizes))
    row_count = min(rows, len(files))
    row_of_file = np.arange(len(files)) * row_count // max(1, len(files))
    cells = _Cells(row_count, min(bins, max(1, MAX_CELLS // max(1, row_count))), begin, end)
    sums = np.zeros((3, len(files)), np.int64)
    for block in _blocks(columns, files, columns.matching(glob), _MAX_KEY // (end - begin + 2)):
        place = slice(block.first - files.start, block.first - files.start + block.count)
        sums[:, place] = block.sums(columns.is_replicated)
        cells.add(block.chosen(block.lengths > 0), row_of_file[place])
    ranks, rank_bytes = _rank_bytes(columns.ranks[own], sums[0])
    edges = np.searchsorted(row_of_file, np.arange(row_count + 1)).tolist()
    return ShardMap(
        rank_count=len(ranks),
        file_count=len(columns.files),
        begin=begin,
        end=end,
        bin_bytes=cells.bin_bytes,
        bins=cells.bins,
        largest_rank=int(ranks[rank_bytes.argmax()]) if len(ranks) else None,
        largest_rank_bytes=int(rank_bytes.max(initial=0)),
        mean_rank_bytes=float(rank_bytes.mean()) if len(ranks) else 0.0,
        rows=tuple(_row(columns, files[first:stop], sums[:, first:stop]) for first, stop in pairwise(edges)),
        **cells.answer(columns),
    )


def _rank_bytes(ranks: Int64, sizes: Int64) -> tuple[Int64, Int64]:
    """Return the ranks and their bytes; without files that have no rank."""
    known = ranks != NO_RANK
    found, places = np.unique(ranks[known], return_inverse=True)
    return found, _sums(places, sizes[known], len(found))


def _row(columns: ChunkColumns, files: range, sums: Int64) -> ShardMapRow:
    """Return a row; ``sums`` are bytes, bytes of replicated tensors, and chunks, by file."""
    own = slice(files.start, files.stop)
    ranks, sizes = columns.ranks[own], columns.file_sizes[own]
    first, last = int(ranks[0]), int(ranks[-1])
    tensor_bytes, replicated_bytes, chunks = sums.sum(axis=1).tolist()
    return ShardMapRow(
        first_rank=None if first == NO_RANK else first,
        last_rank=None if last == NO_RANK else last,
        file=clean_text(columns.files[files.start]),
        files=len(files),
        file_bytes=None if (sizes == UNKNOWN).any() else int(sizes.sum()),
        tensor_bytes=tensor_bytes,
        largest_rank_bytes=int(_rank_bytes(ranks, sums[0])[1].max(initial=0)),
        replicated_bytes=replicated_bytes,
        chunks=chunks,
    )


@dataclass(frozen=True, slots=True)
class _Files:
    """Chunks of ``count`` files starting at ``first``; a file's chunks are ``starts[i]:starts[i + 1]``."""

    first: int
    starts: Int64
    begins: Int64
    lengths: Int64
    tensors: npt.NDArray[np.unsignedinteger[Any]]

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    def sums(self, is_replicated: Bools) -> Int64:
        """Return sums by file: bytes, bytes of replicated tensors, and chunks."""
        again = np.where(is_replicated[self.tensors], self.lengths, 0) if is_replicated.any() else None
        counts = np.diff(self.starts)
        by_file = [
            np.zeros_like(counts) if values is None else np.diff(_before(values)[self.starts])
            for values in (self.lengths, again)
        ]
        return np.stack([*by_file, counts])

    def chosen(self, own: Bools) -> _Files:
        """Return the chosen chunks alone."""
        if own.all():
            return self
        starts = _before(own)[self.starts]
        return _Files(self.first, starts, self.begins[own], self.lengths[own], self.tensors[own])


def _before(values: npt.NDArray[Any]) -> Int64:
    """Return the sums of all values before each, and of all."""
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)])


def _blocks(columns: ChunkColumns, files: range, matching: Bools | None, most_files: int) -> Iterator[_Files]:
    """Yield the chunks of ``files`` in groups of files, to bound memory."""
    first = files.start
    while first < files.stop:
        full = int(np.searchsorted(columns.starts, columns.starts[first] + _BLOCK, "right")) - 1
        stop = min(max(full, first + 1), first + max(1, most_files), files.stop)
        some = slice(int(columns.starts[first]), int(columns.starts[stop]))
        starts = columns.starts[first : stop + 1] - some.start
        lengths = columns.lengths[some].astype(np.int64)
        block = _Files(first, starts, columns.begins[some], lengths, columns.tensors[some])
        yield block if matching is None else block.chosen(matching[block.tensors])
        first = stop


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of ``chunks`` chunks in a cell, of ``bytes`` in all, of which ``most`` are of the tensor
    ``largest``."""

    cells: Int64
    bytes: Int64
    chunks: Int64
    most: Int64
    largest: npt.NDArray[np.unsignedinteger[Any]]


class _Cells:
    """Contents of cells: ``sums`` of bytes and chunks, and the bytes and tensor (``largest``, -1: empty) of
    the largest chunk."""

    def __init__(self, rows: int, bins: int, begin: int, end: int) -> None:
        self.begin = begin
        self.span = end - begin
        self.bins = min(bins, self.span)
        self.bin_bytes = -(-self.span // self.bins)
        self.sums = np.zeros((3, rows * self.bins), np.int64)
        self.largest = np.full(rows * self.bins, -1)

    def add(self, block: _Files, row_of_file: Int64) -> None:
        """Add chunks to the bins, cut at bin edges: first pieces in runs of neighbours, then the rest."""
        low = block.begins - self.begin
        edges = np.minimum(np.arange(self.bins + 1) * self.bin_bytes, self.span)
        counts = self._counts(block, low, edges)
        inside = np.flatnonzero((low >= 0) & (low < self.span))
        runs = np.flatnonzero(counts)
        if len(runs):
            room = np.repeat(edges[runs % self.bins + 1], counts[runs]) - low[inside]
            cells = row_of_file[runs // self.bins] * self.bins + runs % self.bins
            self._put(
                _runs(cells, counts[runs], np.minimum(block.lengths[inside], room), block.tensors[inside])
            )
        reach = low + block.lengths
        bin_ends = np.where(low < 0, 0, (low // self.bin_bytes + 1) * self.bin_bytes)
        rest = np.flatnonzero((reach > bin_ends) & (low < self.span))
        files = np.searchsorted(block.starts, rest, "right") - 1
        self._put(self._rest(row_of_file[files], bin_ends[rest], reach[rest], block.tensors[rest]))

    def _counts(self, block: _Files, low: Int64, edges: Int64) -> Int64:
        """Return the number of chunks that begin in each bin of each file, by bisection of the sorted
        chunks."""
        files = np.arange(block.count) * (self.span + 2)
        keys = np.repeat(files, np.diff(block.starts)) + np.clip(low, -1, self.span)
        places = np.searchsorted(keys, (files[:, None] + edges).reshape(-1))
        found: Int64 = np.diff(places.reshape(block.count, -1), axis=1).reshape(-1)
        return found

    def _rest(self, rows: Int64, low: Int64, high: Int64, tensors: npt.NDArray[Any]) -> _Pieces:
        """Return the pieces of chunks in these rows, from ``low``, where a bin begins, to ``high``."""
        high = np.minimum(high, self.span)
        first = low // self.bin_bytes
        counts = np.maximum(0, (high - 1) // self.bin_bytes - first + 1)
        piece = np.repeat(np.arange(len(counts)), counts)
        bins = first[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
        sizes = np.minimum(high[piece] - bins * self.bin_bytes, self.bin_bytes)
        cells = rows[piece] * self.bins + bins
        return _Pieces(cells, sizes, np.ones_like(sizes), sizes, tensors[piece])

    def _put(self, pieces: _Pieces) -> None:
        for place, values in enumerate((pieces.bytes, pieces.chunks)):
            self.sums[place] += _sums(pieces.cells, values, len(self.largest))
        order = np.argsort(pieces.most, kind="stable")  # the last of several pieces for a cell wins
        most, largest = np.zeros_like(self.largest), np.full_like(self.largest, -1)
        most[pieces.cells[order]] = pieces.most[order]
        largest[pieces.cells[order]] = pieces.largest[order]
        is_more = most > self.sums[2]
        self.sums[2][is_more], self.largest[is_more] = most[is_more], largest[is_more]

    def answer(self, columns: ChunkColumns) -> dict[str, tuple[Any, ...]]:
        """Return the fields of `ShardMap` for nonempty cells."""
        numbers = np.flatnonzero(self.largest >= 0)
        largest = self.largest[numbers]
        tensors, places = np.unique(largest, return_inverse=True)
        codes, of_dtype = np.unique(columns.dtype_codes[largest], return_inverse=True)
        names = [columns.fqns[tensor] for tensor in tensors.tolist()]
        return {
            "names": tuple(map(clean_text, names)),
            "name_layers": tuple(map(layer_number, names)),
            "name_bytes": tuple(columns.stored_bytes[tensors].tolist()),
            "is_replicated": tuple(columns.is_replicated[tensors].tolist()),
            "dtypes": tuple(dtypes.BY_CODE[code].name for code in codes.tolist()),
            "cell_rows": tuple((numbers // self.bins).tolist()),
            "cell_bins": tuple((numbers % self.bins).tolist()),
            "cell_bytes": tuple(self.sums[0][numbers].tolist()),
            "cell_chunks": tuple(self.sums[1][numbers].tolist()),
            "cell_names": tuple(places.reshape(-1).tolist()),
            "cell_dtypes": tuple(of_dtype.reshape(-1).tolist()),
        }


def _runs(cells: Int64, counts: Int64, sizes: Int64, tensors: npt.NDArray[Any]) -> _Pieces:
    """Merge consecutive chunks, ``counts`` per cell, into a piece for each run."""
    starts = np.cumsum(counts) - counts
    most = np.maximum.reduceat(sizes, starts)
    is_most = np.flatnonzero(sizes == np.repeat(most, counts))
    first = is_most[np.searchsorted(is_most, starts)]
    return _Pieces(cells, np.add.reduceat(sizes, starts), counts, most, tensors[first])


def _sums(places: Int64, values: Int64, count: int) -> Int64:
    # As floats, which are exact up to 2^53: several times as fast as integers.
    return np.bincount(places, weights=values, minlength=count).astype(np.int64)
