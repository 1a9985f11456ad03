"""Which rank holds what and where, in as many cells as can be drawn: rows of files, bins of bytes.

Some million chunks are added up as columns; nothing is made for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.server.catalog.values import clean_text
from dcp.server.data.shards import rank_of
from dcp.server.records.drawings import ShardMap, ShardMapRow
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex

__all__ = ["MAX_CELLS", "shard_map"]

MAX_CELLS: Final = 1 << 15
_NO_RANK: Final = -1
_BLOCK: Final = 1 << 19
"""Chunks that are added up at a time."""

Int64 = npt.NDArray[np.int64]


def shard_map(
    index: CheckpointIndex,
    *,
    rows: int = 128,
    bins: int = 64,
    first_rank: int | None = None,
    last_rank: int | None = None,
    begin: int = 0,
    end: int | None = None,
    glob: str | None = None,
) -> ShardMap:
    """The files of the ranks from ``first_rank`` to ``last_rank`` in at most ``rows`` rows, and of each row
    the bytes from ``begin`` to ``end`` (by default of the longest file) in ``bins`` bins; of tensors whose
    names match ``glob``. Rows times bins are `MAX_CELLS` at most."""
    files = _Files(index, rows, first_rank, last_rank)
    matching = None
    if glob is not None:
        matching = np.array([fnmatchcase(fqn, glob) for fqn in index.fqns], bool)
    if end is None:
        ends = (int(block.ends.max(initial=0)) for block in _blocks(index, files, matching))
        sizes = index.file_sizes[files.row_of_file >= 0]
        end = max(*ends, int(sizes.max(initial=0)), begin + 1, 0)
    bins = min(bins, end - begin, max(1, MAX_CELLS // max(1, files.count)))
    bin_bytes = -(-(end - begin) // bins)
    cells = _Cells(files.count, bins, bin_bytes)
    sums = np.zeros((3, files.count), np.int64)
    is_again = _is_replicated(index)
    for block in _blocks(index, files, matching):
        again = block.lengths * is_again[block.tensors]
        for place, values in enumerate((block.lengths, again, np.ones_like(again))):
            sums[place] += _sums(block.rows, values, files.count)
        cells.add(block, begin, end)
    return ShardMap(
        rank_count=files.rank_count,
        file_count=len(index.files),
        begin=begin,
        end=end,
        bin_bytes=bin_bytes,
        bins=bins,
        rows=tuple(files.rows(index, sums)),
        **cells.columns(index),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Some of the chunks: the rows of their files, where they lie in these, and their tensors."""

    rows: Int64
    begins: Int64
    lengths: Int64
    tensors: Int64

    @property
    def ends(self) -> Int64:
        return self.begins + self.lengths


def _blocks(
    index: CheckpointIndex, files: _Files, matching: npt.NDArray[np.bool_] | None
) -> Iterator[_Block]:
    """The chunks of the files that are asked for, some at a time, so that memory is bounded."""
    for start in range(0, max(1, index.chunk_count), _BLOCK):
        some = slice(start, start + _BLOCK)
        rows = files.row_of_file[index.chunk_files[some]]
        own = rows >= 0
        tensors = index.chunk_tensors[some]
        if matching is not None:
            own &= matching[tensors]
        payloads = index.payload_offsets[some]
        begins = np.where(payloads == UNKNOWN, index.record_offsets[some], payloads)
        yield _Block(rows[own], begins[own], index.payload_lengths[some][own], tensors[own])


class _Files:
    """Files by rank, neighbours together; ``row_of_file`` is -1 for those that are not asked for."""

    def __init__(
        self, index: CheckpointIndex, rows: int, first_rank: int | None, last_rank: int | None
    ) -> None:
        known = [rank_of(name) for name in index.files]
        self.ranks = np.array([_NO_RANK if rank is None else rank for rank in known], np.int64)
        self.rank_count = len({rank for rank in known if rank is not None})
        wanted = np.ones(len(known), bool)
        if first_rank is not None:
            wanted &= self.ranks >= first_rank
        if last_rank is not None:
            wanted &= (self.ranks <= last_rank) & (self.ranks != _NO_RANK)
        order = np.lexsort((np.arange(len(known)), self.ranks, self.ranks == _NO_RANK))
        order = order[wanted[order]]
        self.count = min(rows, len(order))
        self.row_of_file = np.full(len(known), -1, np.int64)
        self.row_of_file[order] = np.arange(len(order)) * self.count // max(1, len(order))
        self._order = order

    def rows(self, index: CheckpointIndex, sums: Int64) -> list[ShardMapRow]:
        """What is in the files of each; ``sums`` has its bytes, those of replicated tensors, and chunks."""
        found = []
        for row in range(self.count):
            own = self._order[self.row_of_file[self._order] == row]
            first, last = (int(self.ranks[file]) for file in (own[0], own[-1]))
            stored, again_bytes, chunk_count = sums[:, row].tolist()
            sizes = index.file_sizes[own]
            found.append(
                ShardMapRow(
                    None if first == _NO_RANK else first,
                    None if last == _NO_RANK else last,
                    clean_text(index.files[int(own[0])]),
                    len(own),
                    None if (sizes == UNKNOWN).any() else int(sizes.sum()),
                    stored,
                    again_bytes,
                    chunk_count,
                )
            )
        return found


class _Cells:
    """What is in each cell, with the tensor that has the most bytes in it."""

    def __init__(self, rows: int, bins: int, bin_bytes: int) -> None:
        self._bins, self._bin_bytes = bins, bin_bytes
        self._bytes, self._chunks, self._most = (np.zeros(rows * bins, np.int64) for _ in range(3))
        self._largest = np.full(rows * bins, -1, np.int64)

    def add(self, block: _Block, begin: int, end: int) -> None:
        """What of the chunks lies between ``begin`` and ``end``, cut at the ends of bins."""
        low = np.maximum(block.begins, begin) - begin
        high = np.minimum(block.ends, end) - begin
        chunks = np.flatnonzero(high > low)
        low, high = low[chunks], high[chunks]
        first = low // self._bin_bytes
        counts = (high - 1) // self._bin_bytes - first + 1
        piece = np.repeat(np.arange(len(chunks)), counts)
        bins = first[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = bins * self._bin_bytes
        sizes = np.minimum(high[piece], starts + self._bin_bytes) - np.maximum(low[piece], starts)
        cells = block.rows[chunks][piece] * self._bins + bins
        count = len(self._bytes)
        self._bytes += _sums(cells, sizes, count)
        self._chunks += np.bincount(cells, minlength=count)
        order = np.argsort(sizes, kind="stable")  # of several to one place the last one stays
        most, largest = np.zeros(count, np.int64), np.full(count, -1, np.int64)
        most[cells[order]] = sizes[order]
        largest[cells[order]] = block.tensors[chunks][piece[order]]
        is_more = most > self._most
        self._most[is_more], self._largest[is_more] = most[is_more], largest[is_more]

    def columns(self, index: CheckpointIndex) -> dict[str, tuple[Any, ...]]:
        """Those of `ShardMap`, of cells that hold something."""
        numbers = np.flatnonzero(self._largest >= 0)
        largest = self._largest[numbers]
        tensors, places = np.unique(largest, return_inverse=True)
        codes, dtypes = np.unique(index.dtype_codes[largest], return_inverse=True)
        dtype_rows = [int(np.flatnonzero(index.dtype_codes == code)[0]) for code in codes]
        return {
            "names": tuple(clean_text(index.fqns[int(tensor)]) for tensor in tensors),
            "dtypes": tuple(index.dtype(row).name for row in dtype_rows),
            "cell_rows": tuple((numbers // self._bins).tolist()),
            "cell_bins": tuple((numbers % self._bins).tolist()),
            "cell_bytes": tuple(self._bytes[numbers].tolist()),
            "cell_chunks": tuple(self._chunks[numbers].tolist()),
            "cell_names": tuple(places.reshape(-1).tolist()),
            "cell_dtypes": tuple(dtypes.reshape(-1).tolist()),
        }


def _is_replicated(index: CheckpointIndex) -> npt.NDArray[np.bool_]:
    """By tensor: whether its chunks are more than all of it."""
    stored = np.zeros(index.tensor_count, np.int64)
    np.add.at(stored, index.chunk_tensors, index.payload_lengths)
    elements = np.array(
        [np.prod(index.shape(row), dtype=np.int64) for row in range(index.tensor_count)], np.int64
    )
    return stored > elements * index.itemsizes


def _sums(places: Int64, values: Int64, count: int) -> Int64:
    # As floats, which are exact up to 2^53: several times as fast as integers.
    return np.bincount(places, weights=values, minlength=count).astype(np.int64)
