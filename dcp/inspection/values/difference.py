"""Differences between two checkpoints, of whatever formats and shardings. Torch-free.

Digests come first, then checksums: where both sides have some for the same boxes, or for parts of tensors
that follow one another in memory order (whose CRCs are combined), equal tensors are never read. What is left,
and whatever differs, is read in blocks and compared element by element.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.findings import ReportBytes
from dcp.inspection.values.elements import Array
from dcp.inspection.values.object_differences import ObjectDifference, compare_objects, object_names
from dcp.inspection.values.tensor_differences import Deltas, ValueDifference, are_comparable
from dcp.inspection.values.tensor_reading import TensorReader, open_tensors
from dcp.planners.load.selection import Patterns, Rename, Selection, renamer
from dcp.storage.errors import PlanError
from dcp.storage.formats.checksums import crc32_combine
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry.boxes import Box, contiguous_position, split_box

__all__ = [
    "Difference",
    "ObjectDifference",
    "TensorDifference",
    "TensorFacts",
    "ValueDifference",
    "diff",
    "diff_readers",
]

DifferenceKind = Literal["added", "removed", "shape", "dtype", "changed", "undecided"]

_SLAB_BYTES: Final = 64 << 20
"""What is read at a time of a tensor that both sides cut differently: the more, the fewer blocks twice."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The name and the type of a tensor on one side."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same on both sides.

    ``kind``: only one has it ("added", "removed"), another "shape", another "dtype", values "changed"; or
    "undecided", where checksums do not tell and values were not to be read. ``values`` says by how much,
    where values were compared: of one shape, and for "dtype" perhaps 0 elements differ. ``fqn`` is the name
    in the second checkpoint, if that has it.
    """

    fqn: str
    kind: DifferenceKind
    before: TensorFacts | None
    after: TensorFacts | None
    values: ValueDifference | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of `diff`; ``equal`` names the tensors that are the same, ``equal_objects`` counts the
    values.

    ``bytes_read`` are those of both sides beside the indexes: 0 if checksums tell everything.
    """

    a: str
    b: str
    tensors: tuple[TensorDifference, ...]
    equal: tuple[str, ...]
    objects: tuple[ObjectDifference, ...]
    equal_objects: int
    bytes_read: int

    @property
    def is_empty(self) -> bool:
        """Return whether nothing differs, and nothing is undecided."""
        return not self.tensors and not self.objects


class _Pair(NamedTuple):
    """One tensor's rows in both indexes."""

    fqn: str
    a: int
    b: int


@plain_errors
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    values: bool = True,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options_of_b: Mapping[str, Any] | None = None,
    progress: ReportBytes | None = None,
) -> Difference:
    """Compare the checkpoint ``b`` with ``a``, the one before.

    Memory is bounded by some 300 MiB.

    Args:
        a: A path or URL of a checkpoint or file of any format.
        b: The same, of the one that came after; formats and shardings may differ.
        values: False reads no payload: names, shapes and dtypes are compared, and what checksums tell.
        only: Shell globs on the names as ``b`` has them: what they match, and everything below.
        exclude: The same for what is left out.
        rename: What the names of ``a`` are first put through, as for `dcp.load`.
        storage_options: Of the file systems of URLs, as for `dcp.save`; for both, unless ``options_of_b`` are
            given.
        options_of_b: Those of ``b``.
        progress: A function that gets the bytes done and those in all.

    Returns:
        The tensors and other values that differ, and how; the names of those that are equal.

    Raises:
        PlanError: Nothing is selected, or two names become one.
        CheckpointNotFoundError: Nothing is committed at one of the places.
        CorruptCheckpointError: Bytes are not those that were committed.
        StorageError: The storage cannot be read.
    """
    with (
        open_tensors(a, storage_options=storage_options, verify="full") as first,
        open_tensors(
            b,
            storage_options=storage_options if options_of_b is None else options_of_b,
            verify="full",
        ) as second,
    ):
        return diff_readers(
            first, second, values=values, only=only, exclude=exclude, rename=rename, progress=progress
        )


def diff_readers(
    a: TensorReader,
    b: TensorReader,
    *,
    values: bool = True,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    progress: ReportBytes | None = None,
) -> Difference:
    """`diff` of two open checkpoints."""
    selection, renamed = Selection.of(only, exclude), renamer(rename)
    tensors = _pairs(a.index.fqns, b.index.fqns, selection, renamed)
    objects = _pairs(object_names(a.index), object_names(b.index), selection, renamed)
    if not tensors and not objects and selection is not None:  # patterns are easily mistyped
        where = f"{a.name}, {b.name}: only={only!r}, exclude={exclude!r}"
        raise PlanError(f"{where} select nothing; patterns are shell globs such as 'model.*'")
    found: dict[str, TensorDifference] = {}
    compared: list[_Pair] = []
    equal: list[str] = []
    for first, second in tensors:
        row_a = -1 if first is None else a.index.position[first]
        row_b = -1 if second is None else b.index.position[second]
        pair = _Pair(second or first or "", row_a, row_b)
        difference = _by_index(a, b, pair)
        if difference is None:
            equal.append(pair.fqn)
            continue
        found[pair.fqn] = difference
        if values and _has_values_to_compare(a.index, b.index, pair):
            compared.append(pair)
    for pair, value in _ValueComparison(a, b, progress).run(compared):
        known = found[pair.fqn]
        if value.differing == 0 and known.kind != "dtype":
            del found[pair.fqn]
            equal.append(pair.fqn)
        else:
            kind: DifferenceKind = "dtype" if known.kind == "dtype" else "changed"
            found[pair.fqn] = TensorDifference(pair.fqn, kind, known.before, known.after, value)
    changed_objects = compare_objects(a, b, objects, values=values)
    order = {second or first: place for place, (first, second) in enumerate(tensors)}
    return Difference(
        a.name,
        b.name,
        tuple(found.values()),
        tuple(sorted(equal, key=order.__getitem__)),
        tuple(changed_objects),
        len(objects) - len(changed_objects),
        a.bytes_read + b.bytes_read,
    )


def _pairs(
    a: Iterable[str],
    b: Iterable[str],
    selection: Selection | None,
    renamed: Callable[[str], str] | None,
) -> list[tuple[str | None, str | None]]:
    """Return selected (name in a, name in b), None where one lacks it: those of a in order, then others."""
    names: dict[str, str] = {}
    for fqn in a:
        name = fqn if renamed is None else renamed(fqn)
        if names.setdefault(name, fqn) != fqn:
            raise PlanError(f"rename gives {name!r} for both {names[name]!r} and {fqn!r}", fqn=fqn)
    others = dict.fromkeys(b)
    pairs = []
    for name in {**names, **others}:
        if selection is None or selection.selects(name):
            pairs.append((names.get(name), name if name in others else None))
    return pairs


# -- by the indexes ------------------------------------------------------------------------------------------


def _by_index(a: TensorReader, b: TensorReader, pair: _Pair) -> TensorDifference | None:
    """Return None if the tensors are the same; "undecided" where only values tell."""
    before = _facts(a.index, pair.a) if pair.a >= 0 else None
    after = _facts(b.index, pair.b) if pair.b >= 0 else None

    def difference(kind: DifferenceKind) -> TensorDifference:
        return TensorDifference(pair.fqn, kind, before, after)

    if before is None or after is None:
        return difference("added" if before is None else "removed")
    if before.shape != after.shape:
        return difference("shape")
    if before.dtype != after.dtype:
        return difference("dtype")
    same = True if 0 in before.shape else _same_by_checksums(a, b, pair)
    if same:
        return None
    return difference("undecided" if same is None else "changed")


def _facts(index: CheckpointIndex, row: int) -> TensorFacts:
    return TensorFacts(index.fqns[row], index.dtype(row).name, index.shape(row))


def _has_values_to_compare(a: CheckpointIndex, b: CheckpointIndex, pair: _Pair) -> bool:
    if pair.a < 0 or pair.b < 0 or a.shape(pair.a) != b.shape(pair.b):
        return False
    return are_comparable(a.dtype(pair.a), b.dtype(pair.b))


def _same_by_checksums(a: TensorReader, b: TensorReader, pair: _Pair) -> bool | None:
    """Return None where neither digests nor checksums tell."""
    digests = a.index.digest(pair.a), b.index.digest(pair.b)
    if None not in digests:
        return digests[0] == digests[1]
    chunks = _chunks_of_boxes(a, pair.a), _chunks_of_boxes(b, pair.b)
    if chunks[0] is not None and chunks[1] is not None and chunks[0].keys() == chunks[1].keys():
        known = [_same_payload(a, b, chunk, chunks[1][box]) for box, chunk in chunks[0].items()]
        return None if None in known else all(known)
    whole = _whole_crc(a, pair.a), _whole_crc(b, pair.b)
    return None if None in whole else whole[0] == whole[1]


def _chunks_of_boxes(reader: TensorReader, row: int) -> dict[Box, int] | None:
    """Return the chunks by their boxes; None if they lie over each other."""
    index = reader.index
    found = {}
    for part in reader.parts(row):
        if index.box(part.chunk) != part.box:
            return None
        found[part.box] = part.chunk
    return found


def _same_payload(a: TensorReader, b: TensorReader, chunk_a: int, chunk_b: int) -> bool | None:
    """Return None where checksums do not tell."""
    blocks = a.index.block_crcs(chunk_a), b.index.block_crcs(chunk_b)
    if len(blocks[0]) and len(blocks[1]):
        return bool((blocks[0] == blocks[1]).all())
    layout = a.layout_of(chunk_a)
    if layout != b.layout_of(chunk_b):
        return None
    whole = a.payload_crc(chunk_a), b.payload_crc(chunk_b)
    if None in whole:
        return None
    # Of a payload in another order there may be bytes between the elements, which need not be the same.
    return True if whole[0] == whole[1] else False if layout is None else None


def _whole_crc(reader: TensorReader, row: int) -> int | None:
    """Return CRC-32 of a tensor's bytes in C order, if its chunks follow one another there."""
    index, shape = reader.index, reader.index.shape(row)
    chunks = _chunks_of_boxes(reader, row)
    if chunks is None:
        return None
    total, position = 0, 0
    for chunk in chunks.values():
        box = index.box(chunk)
        follows = contiguous_position(shape, box) == position and reader.is_c_ordered(chunk)
        crc = reader.payload_crc(chunk) if follows else None
        if crc is None:
            return None
        total = crc32_combine(total, crc, int(index.payload_lengths[chunk]))
        position += box.volume
    return total


# -- by the values -------------------------------------------------------------------------------------------


class _ValueComparison:
    """Reads both sides of tensors, and adds up by how much they differ."""

    def __init__(self, a: TensorReader, b: TensorReader, progress: ReportBytes | None) -> None:
        self._a, self._b = a, b
        self._progress = progress
        self._done_bytes = self._total_bytes = 0

    def run(self, pairs: list[_Pair]) -> Iterator[tuple[_Pair, ValueDifference]]:
        """Yield all ``pairs``; those first that both sides have in the same boxes."""
        self._total_bytes = sum(self._a.tensor_bytes(pair.a) + self._b.tensor_bytes(pair.b) for pair in pairs)
        alike = [pair for pair in pairs if self._are_cut_alike(pair)]
        yield from self._run_alike(alike)
        for pair in sorted({*pairs} - {*alike}, key=lambda pair: pair.a):
            deltas = self._deltas(pair)
            for first, second in self._slabs(pair):
                self._add(deltas, first, second)
            yield pair, deltas.result()

    def _are_cut_alike(self, pair: _Pair) -> bool:
        a, b = self._a, self._b
        chunks = _chunks_of_boxes(a, pair.a), _chunks_of_boxes(b, pair.b)
        if chunks[0] is None or chunks[1] is None or chunks[0].keys() != chunks[1].keys():
            return False
        if a.index.dtype(pair.a).itemsize != b.index.dtype(pair.b).itemsize:
            return False
        return all(a.is_c_ordered(chunk) for chunk in chunks[0].values()) and all(
            b.is_c_ordered(chunk) for chunk in chunks[1].values()
        )

    def _run_alike(self, pairs: list[_Pair]) -> Iterator[tuple[_Pair, ValueDifference]]:
        """Compare tensors that are cut alike: blocks of both sides are the same boxes, so that two streams
        will do, each with its checksums."""
        by_row = {pair.a: pair for pair in pairs}
        deltas: Deltas | None = None
        current = -1
        with (
            contextlib.closing(self._a.stream([pair.a for pair in pairs])) as blocks_a,
            contextlib.closing(self._b.stream([pair.b for pair in pairs])) as blocks_b,
        ):
            for (row, first), (_, second) in zip(blocks_a, blocks_b, strict=True):
                if row != current:
                    if deltas is not None:
                        yield by_row[current], deltas.result()
                    current, deltas = row, self._deltas(by_row[row])
                if deltas is not None:
                    self._add(deltas, first.array, second.array)
        if deltas is not None:
            yield by_row[current], deltas.result()

    def _slabs(self, pair: _Pair) -> Iterator[tuple[Array, Array]]:
        """Yield the same boxes of both sides, however those are cut: along what is stored turned, if
        anything."""
        a, b = self._a, self._b
        for reader, row, other, other_row in ((a, pair.a, b, pair.b), (b, pair.b, a, pair.a)):
            if not all(reader.is_c_ordered(part.chunk) for part in reader.parts(row)):
                for _, tile in reader.stream([row], _SLAB_BYTES):
                    array = other.read(other_row, Box(tile.offsets, tile.array.shape).slices)
                    yield (tile.array, array) if reader is a else (array, tile.array)
                return
        shape = a.index.shape(pair.a)
        itemsize = max(a.index.dtype(pair.a).itemsize, b.index.dtype(pair.b).itemsize)
        for box in split_box(Box.whole(shape), _SLAB_BYTES // itemsize):
            yield a.read(pair.a, box.slices), b.read(pair.b, box.slices)

    def _deltas(self, pair: _Pair) -> Deltas:
        return Deltas(self._a.index.dtype(pair.a), self._b.index.dtype(pair.b))

    def _add(self, deltas: Deltas, first: Array, second: Array) -> None:
        deltas.add(first, second)
        self._done_bytes += first.nbytes + second.nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
