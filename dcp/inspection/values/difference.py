"""Differences between two checkpoints, of whatever formats and shardings. Torch-free.

Digests come first, then checksums: where both sides have some for the same boxes, or for parts of tensors
that follow one another in memory order (whose CRCs are combined), equal tensors are never read. What is left,
and whatever differs, is read in blocks and compared element by element.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.findings import ReportBytes
from dcp.inspection.values.elements import Array, decode, is_integral, is_opaque
from dcp.inspection.values.object_differences import ObjectDifference, compare_objects, object_names
from dcp.inspection.values.tensor_reading import TensorReader, open_tensors
from dcp.planners.load.selection import Patterns, Rename, Selection, renamer
from dcp.storage.errors import PlanError
from dcp.storage.formats.checksums import crc32_combine
from dcp.storage.formats.dtypes import Dtype
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry.boxes import Box, contiguous_position, split_box

DifferenceKind = Literal["added", "removed", "shape", "dtype", "changed", "undecided"]

_SLAB_BYTES: Final = 64 << 20
"""What is read at a time of a tensor that both sides cut differently: the more, the fewer blocks twice."""

_STEP: Final = 1 << 15
"""Elements at a time, so that all that is done to them finds them in the cache."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """``differing`` of ``elements`` are not the same.

    Of tensors of one dtype those are not the same whose bits differ: 0.0 and -0.0 are two things, and a NaN
    is itself. Of two dtypes their values are compared, and all NaNs are one. ``nonfinite`` of those that
    differ are NaN or infinite on a side; ``max_abs`` and ``relative_l2`` (the L2 norm of the differences
    divided by that of the first tensor; infinite where that is 0) are of the others. Both are None for bits
    without a meaning, and where no element is finite on both sides. ``nonfinite_after`` elements of the
    second tensor are NaN or infinite, whether they differ or not.
    """

    elements: int
    differing: int
    nonfinite: int
    max_abs: float | None
    relative_l2: float | None
    nonfinite_after: int = 0


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
    options_of_b = storage_options if options_of_b is None else options_of_b
    how: dict[str, Any] = {
        "values": values,
        "only": only,
        "exclude": exclude,
        "rename": rename,
        "progress": progress,
    }
    with (
        open_tensors(a, storage_options=storage_options, verify="full") as first,
        open_tensors(b, storage_options=options_of_b, verify="full") as second,
    ):
        return diff_readers(first, second, **how)


class _Pair(NamedTuple):
    """One tensor that both checkpoints have: its place in the result, and its rows in their indexes."""

    place: int
    a: int
    b: int


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
    tensors = _names(a.index.fqns, b.index.fqns, selection, renamed)
    objects = _names(object_names(a.index), object_names(b.index), selection, renamed)
    if not tensors and not objects and selection is not None:  # patterns are easily mistyped
        where = f"{a.name}, {b.name}: only={only!r}, exclude={exclude!r}"
        raise PlanError(f"{where} select nothing; patterns are shell globs such as 'model.*'")
    found: list[TensorDifference | None] = []
    compared: list[_Pair] = []
    for place, (first, second) in enumerate(tensors):
        before, after = _facts(a.index, first), _facts(b.index, second)
        kind = _kind(before, after)
        if first is not None and second is not None and kind != "shape":
            pair = _Pair(place, a.index.position[first], b.index.position[second])
            kind = kind or _kind_by_checksums(a, b, pair)
            if kind and values and _are_comparable(a.index.dtype(pair.a), b.index.dtype(pair.b)):
                compared.append(pair)
        found.append(kind and TensorDifference(second or first or "", kind, before, after))
    for pair, value in _ValueComparison(a, b, progress).run(compared):
        known = found[pair.place]
        if known is not None and known.kind == "dtype":
            found[pair.place] = replace(known, values=value)
        elif known is not None:
            found[pair.place] = replace(known, kind="changed", values=value) if value.differing else None
    changed_objects = compare_objects(a, b, objects, values=values)
    return Difference(
        a.name,
        b.name,
        tuple(one for one in found if one is not None),
        tuple(second or "" for (_, second), one in zip(tensors, found, strict=True) if one is None),
        tuple(changed_objects),
        len(objects) - len(changed_objects),
        a.bytes_read + b.bytes_read,
    )


def _names(
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
    return [
        (names.get(name), name if name in others else None)
        for name in {**names, **others}
        if selection is None or selection.selects(name)
    ]


# -- by the indexes ------------------------------------------------------------------------------------------


def _facts(index: CheckpointIndex, fqn: str | None) -> TensorFacts | None:
    if fqn is None:
        return None
    row = index.position[fqn]
    return TensorFacts(fqn, index.dtype(row).name, index.shape(row))


def _kind(before: TensorFacts | None, after: TensorFacts | None) -> DifferenceKind | None:
    """Return the difference that names, shapes and dtypes tell."""
    if before is None or after is None:
        return "added" if before is None else "removed"
    if before.shape != after.shape:
        return "shape"
    return None if before.dtype == after.dtype else "dtype"


def _kind_by_checksums(a: TensorReader, b: TensorReader, pair: _Pair) -> DifferenceKind | None:
    same = True if 0 in a.index.shape(pair.a) else _same_by_checksums(a, b, pair)
    return None if same else "undecided" if same is None else "changed"


def _same_by_checksums(a: TensorReader, b: TensorReader, pair: _Pair) -> bool | None:
    """Return None where neither digests nor checksums tell."""
    digests = a.index.digest(pair.a), b.index.digest(pair.b)
    if None not in digests:
        return digests[0] == digests[1]
    chunks = _pairs_of_chunks(a, b, pair)
    if chunks is not None:
        known = [_same_payload(a, b, *both) for both in chunks]
        return None if None in known else all(known)
    whole = _whole_crc(a, pair.a), _whole_crc(b, pair.b)
    return None if None in whole else whole[0] == whole[1]


def _pairs_of_chunks(a: TensorReader, b: TensorReader, pair: _Pair) -> list[tuple[int, int]] | None:
    """Return the chunks of both sides that are the same boxes; None where they are cut differently."""
    first, second = _chunks_of_boxes(a, pair.a), _chunks_of_boxes(b, pair.b)
    if first is None or second is None or first.keys() != second.keys():
        return None
    return [(chunk, second[box]) for box, chunk in first.items()]


def _chunks_of_boxes(reader: TensorReader, row: int) -> dict[Box, int] | None:
    """Return the chunks by their boxes; None if they lie over each other."""
    parts = reader.parts(row)
    if any(reader.index.box(part.chunk) != part.box for part in parts):
        return None
    return {part.box: part.chunk for part in parts}


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
    index, chunks, total, position = reader.index, _chunks_of_boxes(reader, row), 0, 0
    if chunks is None:
        return None
    for box, chunk in chunks.items():
        follows = contiguous_position(index.shape(row), box) == position and reader.is_c_ordered(chunk)
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
        self._a, self._b, self._progress = a, b, progress
        self._done_bytes = self._total_bytes = 0

    def run(self, pairs: list[_Pair]) -> Iterator[tuple[_Pair, ValueDifference]]:
        """Yield all ``pairs``; those first that both sides have in the same boxes."""
        self._total_bytes = sum(self._a.tensor_bytes(pair.a) + self._b.tensor_bytes(pair.b) for pair in pairs)
        alike = [pair for pair in pairs if self._are_cut_alike(pair)]
        others = sorted({*pairs} - {*alike}, key=lambda pair: pair.a)
        for some in (self._blocks(alike), ((pair, *both) for pair in others for both in self._slabs(pair))):
            deltas: dict[_Pair, _Deltas] = {}
            for pair, first, second in some:
                if pair not in deltas:
                    yield from ((done, deltas.pop(done).result()) for done in [*deltas])
                    deltas[pair] = _Deltas(self._a.index.dtype(pair.a), self._b.index.dtype(pair.b))
                deltas[pair].add(first, second)
                self._done_bytes += first.nbytes + second.nbytes
                if self._progress is not None:
                    self._progress(self._done_bytes, self._total_bytes)
            yield from ((done, one.result()) for done, one in deltas.items())

    def _are_cut_alike(self, pair: _Pair) -> bool:
        a, b = self._a, self._b
        chunks = _pairs_of_chunks(a, b, pair)
        if chunks is None or a.index.dtype(pair.a).itemsize != b.index.dtype(pair.b).itemsize:
            return False
        return all(a.is_c_ordered(first) and b.is_c_ordered(second) for first, second in chunks)

    def _blocks(self, pairs: list[_Pair]) -> Iterator[tuple[_Pair, Array, Array]]:
        """Yield blocks of tensors that are cut alike: those of both sides are the same boxes, so that two
        streams will do, each with its checksums."""
        by_row = {pair.a: pair for pair in pairs}
        with (
            contextlib.closing(self._a.stream([pair.a for pair in pairs])) as first,
            contextlib.closing(self._b.stream([pair.b for pair in pairs])) as second,
        ):
            for (row, one), (_, other) in zip(first, second, strict=True):
                yield by_row[row], one.array, other.array

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
        itemsize = max(a.index.dtype(pair.a).itemsize, b.index.dtype(pair.b).itemsize)
        for box in split_box(Box.whole(a.index.shape(pair.a)), _SLAB_BYTES // itemsize):
            yield a.read(pair.a, box.slices), b.read(pair.b, box.slices)


def _are_comparable(first: Dtype, second: Dtype) -> bool:
    """Return whether elements of one dtype can be compared with those of the other."""
    odd = (is_opaque(dtype) or dtype.name == "float4_e2m1fn_x2" for dtype in (first, second))
    return first == second or not any(odd)


class _Deltas:
    """Takes pairs of arrays of one shape, as `elements.stored_dtype` says; see `_are_comparable`."""

    def __init__(self, first: Dtype, second: Dtype) -> None:
        self._first, self._second = first, second
        self._compares_bits = first == second
        self._has_values = not is_opaque(first)
        self._is_wide = first == second and is_integral(first) and first.itemsize == 8
        self.elements = self.differing = 0
        self._nonfinite = self._nonfinite_after = self._finite = 0
        self._max_abs = self._delta_squares = self._squares = 0.0

    def add(self, first: Array, second: Array) -> None:
        """Add one pair."""
        first, second = first.reshape(-1), second.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(first), _STEP):
                self._add_step(first[begin : begin + _STEP], second[begin : begin + _STEP])

    def _add_step(self, first: Array, second: Array) -> None:
        self.elements += len(first)
        if not self._has_values:
            self.differing += int(np.count_nonzero(_bits_differ(first, second)))
            return
        a, b = _numbers(first, self._first), _numbers(second, self._second)
        if self._compares_bits:
            differ = _bits_differ(first, second)
        else:
            differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
        count = int(np.count_nonzero(differ))
        self.differing += count
        finite, finite_after = np.isfinite(a), np.isfinite(b)
        if not (finite.all() and finite_after.all()):
            finite &= finite_after
            self._nonfinite += int(np.count_nonzero(differ & ~finite))
            self._nonfinite_after += int(np.count_nonzero(~finite_after))
            first, second, a, b = first[finite], second[finite], a[finite], b[finite]
        self._finite += len(a)
        self._squares += _square_sum(a)
        if count:
            deltas = _exact(first, second) if self._is_wide else np.abs(a - b)
            self._max_abs = max(self._max_abs, float(deltas.max(initial=0.0)))
            self._delta_squares += _square_sum(deltas)

    def result(self) -> ValueDifference:
        """Return the result, once all has been added."""
        relative = 0.0
        if self._delta_squares:
            relative = math.sqrt(self._delta_squares / self._squares) if self._squares else math.inf
        is_known = self._has_values and (self._finite > 0 or self.elements == 0)
        return ValueDifference(
            self.elements,
            self.differing,
            self._nonfinite,
            self._max_abs if is_known else None,
            relative if is_known else None,
            self._nonfinite_after,
        )


def _numbers(array: Array, dtype: Dtype) -> Array:
    numbers = decode(array, dtype)
    return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


def _bits_differ(first: Array, second: Array) -> npt.NDArray[np.bool_]:
    size = min(first.itemsize, 8)
    parts = first.view(f"u{size}") != second.view(f"u{size}")
    differ: npt.NDArray[np.bool_] = parts.reshape(len(first), -1).any(axis=1) if first.itemsize > 8 else parts
    return differ


def _square_sum(values: npt.NDArray[Any]) -> float:
    return float(np.square(values.view(np.float64)).sum())  # of complex numbers both parts


def _exact(first: Array, second: Array) -> npt.NDArray[np.float64]:
    """Return differences of integers of 64 bits, which float64 would round before it subtracts them."""
    up = first.astype(np.uint64) - second.astype(np.uint64)  # modulo 2**64, so right where first > second
    return np.where(first > second, up, np.uint64(0) - up).astype(np.float64)
