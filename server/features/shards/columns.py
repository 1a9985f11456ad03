"""Columns of a checkpoint's chunks in the order of ranks, files and bytes, of which maps and lists are made.

They take a quarter of the memory of the index, so that they are kept where that is not; and they are sorted,
so that those of some million chunks that are in some bins of bytes are found by bisection.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.formats.index import UNKNOWN, CheckpointIndex

__all__ = ["NO_RANK", "ChunkColumns", "rank_of"]

NO_RANK: Final = np.iinfo(np.int64).max
"""Of files whose names do not have one: behind all others."""
_NAME_BYTES: Final = 80
_RANK_FILE: Final = re.compile(r"__([0-9]{1,9})_[0-9]+(?:\.[0-9A-Za-z-]+)?\.distcp")

Int64 = npt.NDArray[np.int64]
Unsigned = npt.NDArray[np.unsignedinteger[Any]]


def rank_of(file: str) -> int | None:
    """The rank that wrote a file, from its name in checkpoints of dcp and of stock DCP."""
    match = _RANK_FILE.fullmatch(file)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """Files by rank: ``ranks``, ``files``, ``file_sizes``, ``file_ends`` (behind the last payload).

    The chunks of file i are ``starts[i]:starts[i + 1]``, by their first bytes: ``begins``, ``lengths``, and
    their ``tensors`` and ``rows`` in the index. Of tensors: ``fqns``, ``dtype_codes``, the bytes that are
    stored (``stored_bytes``), and whether these are more than the tensor has (``is_replicated``).
    """

    ranks: Int64
    files: tuple[str, ...]
    file_sizes: Int64
    file_ends: Int64
    starts: Int64
    begins: Int64
    lengths: Unsigned
    tensors: Unsigned
    rows: Unsigned
    fqns: Sequence[str]
    dtype_codes: npt.NDArray[np.uint8]
    stored_bytes: Int64
    is_replicated: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, index: CheckpointIndex) -> ChunkColumns:
        """The columns of an index."""
        known = map(rank_of, index.files)
        ranks = np.array([NO_RANK if rank is None else rank for rank in known], np.int64)
        by_rank = np.argsort(ranks, kind="stable")
        place = np.empty(len(ranks), _unsigned(len(ranks)))
        place[by_rank] = np.arange(len(ranks))
        places = place[index.chunk_files]
        begins = np.where(index.payload_offsets == UNKNOWN, index.record_offsets, index.payload_offsets)
        rows = _sorted(places, begins)
        starts = np.concatenate([[0], np.cumsum(np.bincount(places, minlength=len(ranks)))]).astype(np.int64)
        lengths = index.payload_lengths[rows]
        begins = begins[rows]
        stored = np.diff(np.concatenate([[0], np.cumsum(index.payload_lengths)])[index.chunk_start])
        return cls(
            ranks=ranks[by_rank],
            files=tuple(index.files[file] for file in by_rank.tolist()),
            file_sizes=index.file_sizes[by_rank],
            file_ends=_greatest(begins + lengths, starts),
            starts=starts,
            begins=begins,
            lengths=lengths.astype(_unsigned(int(lengths.max(initial=0)))),
            tensors=index.chunk_tensors[rows].astype(_unsigned(index.tensor_count)),
            rows=rows.astype(_unsigned(index.chunk_count)),
            fqns=index.fqns,
            dtype_codes=index.dtype_codes,
            stored_bytes=stored,
            is_replicated=stored > _whole_bytes(index),
        )

    @property
    def held_bytes(self) -> int:
        """About how much memory they take."""
        columns = (self.begins, self.lengths, self.tensors, self.rows)
        return sum(column.nbytes for column in columns) + _NAME_BYTES * (len(self.fqns) + 3 * len(self.files))

    def files_of(self, first_rank: int | None, last_rank: int | None) -> range:
        """The files of these ranks; without a bound also those that have no rank."""
        if first_rank is None and last_rank is None:
            return range(len(self.files))
        begin = 0 if first_rank is None else int(np.searchsorted(self.ranks, first_rank))
        last = NO_RANK - 1 if last_rank is None else last_rank
        return range(begin, max(begin, int(np.searchsorted(self.ranks, last, "right"))))

    def matching(self, glob: str | None) -> npt.NDArray[np.bool_] | None:
        """By tensor whether its name matches; None: all do."""
        if glob is None:
            return None
        return np.array([fnmatchcase(fqn, glob) for fqn in self.fqns], bool)


def _sorted(places: Unsigned, begins: Int64) -> Int64:
    """The order by file and begin. Writers go through tensors in order, so that sorting by file often does,
    which is quick where there are less than 65,536."""
    order = np.argsort(places, kind="stable")
    falls = np.diff(begins[order]) < 0
    if (falls & (np.diff(places[order].astype(np.int64)) == 0)).any():
        order = np.lexsort((begins, places))
    return order


def _greatest(values: Int64, starts: Int64) -> Int64:
    """The greatest of each group of values; 0 of those without any."""
    found = np.zeros(len(starts) - 1, np.int64)
    filled = np.flatnonzero(np.diff(starts))
    if len(filled):
        found[filled] = np.maximum.reduceat(values, starts[filled])
    return found


def _whole_bytes(index: CheckpointIndex) -> Int64:
    """By tensor: what all of it takes, once."""
    shapes = (index.shape(row) for row in range(index.tensor_count))
    return np.array([np.prod(shape, dtype=np.int64) for shape in shapes], np.int64) * index.itemsizes


def _unsigned(greatest: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.min_scalar_type(max(1, greatest))
