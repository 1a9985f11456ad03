"""Layout of a conversion's target, known before a byte moves: files, literal bytes, copies of tensors' boxes.

A file of the output is tiled exactly by literals (headers, pickles, directories) and copies. A copy is one
box of one tensor of the source, C-ordered in the file and perhaps cast. What depends on the bytes copied,
CRC-32s in a zip, stands at `Holes` in the literals, and is filled in when the copies are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import NamedTuple

import numpy as np

from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.strides import Int64, gather_rows, starts
from dcp.storage.stores.base import check_name

__all__ = ["Copies", "Hole", "Literal", "Literals", "TargetLayout"]


class Literal(NamedTuple):
    """``data`` at ``offset`` of file number ``file``."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, eq=False)
class Literals:
    """`Literal`s by column: there may be one for each tensor."""

    files: Int64
    offsets: Int64
    data: Sequence[bytes]

    @classmethod
    def of(cls, literals: Sequence[Literal]) -> Literals:
        """Return the columns of ``literals``."""
        files, offsets = (np.array([literal[field] for literal in literals], np.int64) for field in (0, 1))
        return cls(files, offsets, [literal.data for literal in literals])

    def __iter__(self) -> Iterator[Literal]:
        return starmap(Literal, zip(self.files.tolist(), self.offsets.tolist(), self.data, strict=True))

    def of_file(self, file: int) -> list[tuple[int, bytes]]:
        """Return (offset, data) of those of one file, in its order."""
        rows = np.flatnonzero(self.files == file)
        rows = rows[np.argsort(self.offsets[rows], kind="stable")]
        return list(zip(self.offsets[rows].tolist(), map(self.data.__getitem__, rows.tolist()), strict=True))


class Hole(NamedTuple):
    """Four bytes of a literal, at ``offset`` of file number ``file``: the CRC-32 of copy number ``copy``."""

    copy: int
    file: int
    offset: int


@dataclass(frozen=True, eq=False)
class Copies:
    """Boxes of tensors that are copied, by column: rows of the source's index, the box (flat, sliced by
    ``box_start``), the target's dtype code, and ``size_bytes`` at ``offsets`` of file number ``files``."""

    tensors: Int64
    box_start: Int64
    box_offsets: Int64
    box_sizes: Int64
    dtype_codes: Int64
    files: Int64
    offsets: Int64
    size_bytes: Int64

    @classmethod
    def of_tensors(
        cls,
        index: CheckpointIndex,
        tensors: Sequence[int] | Int64,
        dtype_codes: Sequence[int] | Int64,
        files: Sequence[int] | Int64,
        offsets: Sequence[int] | Int64,
        size_bytes: Sequence[int] | Int64,
    ) -> Copies:
        """Return whole tensors: rows of ``index``, and where each gets to."""
        rows, *columns = np.array((tensors, dtype_codes, files, offsets, size_bytes), np.int64)
        box_sizes = gather_rows(index.shape_values, index.shape_start, rows)
        box_start = starts(index.ndims[rows])
        return cls(rows, box_start, np.zeros_like(box_sizes), box_sizes, *columns)

    @classmethod
    def of_boxes(cls, boxes: Sequence[tuple[int, Box, int, int, int, int]]) -> Copies:
        """Return copies of ``boxes``: (tensor, box, dtype code, file, offset, size in bytes) of each."""
        tensors, codes, files, offsets, sizes = (
            np.array([one[field] for one in boxes], np.int64) for field in (0, 2, 3, 4, 5)
        )
        begins, extents = (
            np.array([number for one in boxes for number in one[1][side]], np.int64) for side in (0, 1)
        )
        box_start = starts([len(one[1].sizes) for one in boxes])
        return cls(tensors, box_start, begins, extents, codes, files, offsets, sizes)

    def __len__(self) -> int:
        return len(self.tensors)


def _none(folder: str, names: Collection[str]) -> frozenset[str]:
    return frozenset()


def _checked_path(path: str) -> str:
    """Return the path of a file of the folder, or of one directly below it."""
    folder, slash, name = path.partition("/")
    return f"{check_name(folder)}/{check_name(name)}" if slash else check_name(path)


@dataclass(frozen=True, eq=False)
class TargetLayout:
    """The whole output.

    ``file_names`` and ``file_sizes`` (bytes) are known exactly. For a ``dcp`` target ``index`` is what the
    manifest will say, but for checksums, and ``chunk_copies`` the copy that each of its chunks is.
    ``last_files`` are small files to be written when all others are complete, by path. ``replaced`` says
    which files of a folder that is replaced do not stay besides those of checkpoints, by their names: of the
    folder itself, which is called "" then, or of one directly below.
    ``tensor_copies`` names the copy of each tensor where there is just one.
    """

    file_names: Sequence[str]
    file_sizes: Sequence[int]
    literals: Literals
    copies: Copies
    holes: Sequence[Hole] = ()
    index: CheckpointIndex | None = None
    chunk_copies: Int64 | None = None
    last_files: Mapping[str, bytes] = field(default_factory=dict)
    tensor_copies: Mapping[str, int] = field(default_factory=dict)
    replaced: Callable[[str, Collection[str]], frozenset[str]] = _none

    def check(self) -> None:
        """Raise PlanError unless literals and copies tile each file: a hole would be zeros that were
        never saved.

        Nor may two files have one name; CheckpointFormatError for names that lead elsewhere.
        """
        names = [*map(check_name, self.file_names), *map(_checked_path, self.last_files)]
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise PlanError(f"{twice} would be two files: rename what it is made of")
        sizes = np.array(list(map(len, self.literals.data)), np.int64)
        files = np.concatenate([self.literals.files, self.copies.files])
        offsets = np.concatenate([self.literals.offsets, self.copies.offsets])
        sizes = np.concatenate([sizes, self.copies.size_bytes])
        order = np.lexsort((sizes, offsets, files))
        files, offsets, sizes = files[order], offsets[order], sizes[order]
        for number, (name, size) in enumerate(zip(self.file_names, self.file_sizes, strict=True)):
            rows = slice(*np.searchsorted(files, (number, number + 1)).tolist())
            ends = offsets[rows] + sizes[rows]
            begins = np.concatenate([offsets[rows], [size]])
            if not np.array_equal(begins, np.concatenate([[0], ends])):
                raise PlanError(f"the layout of {name} leaves gaps or overlaps; this is an error of dcphub")
