"""Differences between two checkpoints of any formats and shardings. Does not import torch.

Digests are compared first, then checksums of equal boxes or of consecutive parts (whose CRCs are combined).
Tensors with equal digests or checksums are not read. All others are read in blocks and compared element by
element.

Values are compared by their encodings, without executing pickles. Harmless values are compared by value and
exact type (1 and 1.0 differ, NaN equals itself bit by bit), other and large values by their pickles;
different pickles may have equal values.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.checkpoints import ObjectRow, object_rows
from dcp.inspection.values.elements import Array, decode, is_integral, is_opaque
from dcp.inspection.values.tensor_reading import ReportBytes, TensorReader, opened
from dcp.planners.load.selection import Patterns, Rename, Selection, renamer
from dcp.storage.errors import CheckpointFormatError, PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_combine
from dcp.storage.formats.dtypes import Dtype
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.archive import entry_start, read_directory
from dcp.storage.formats.torch.python_values import decode_value, encode_value
from dcp.storage.geometry.boxes import Box, contiguous_position, split_box

DifferenceKind = Literal["added", "removed", "shape", "dtype", "changed", "undecided"]

_SLAB_BYTES: Final = 64 << 20
"""Bytes read at a time of a tensor with different chunks; large slabs read fewer blocks twice."""

_STEP: Final = 1 << 15
"""Elements processed at a time, within the cache."""

_MAX_ENCODED_BYTES: Final = 1 << 30

_Rows: TypeAlias = tuple[int, int]
"""Rows of a common tensor in both indexes."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """Number of ``differing`` among ``elements``.

    Elements of one dtype differ if their bits differ: 0.0 and -0.0 are different, and a NaN equals itself.
    Elements of two dtypes are compared by value, with all NaNs equal.

    Attributes:
        nonfinite: Differing elements that are NaN or infinite on one side.
        max_abs: Largest absolute difference of finite elements.
        relative_l2: L2 norm of the differences divided by the first tensor's; infinite if zero. None, like
            ``max_abs``, for opaque bits and without finite elements.
        nonfinite_after: NaN or infinite elements of the second tensor.
    """

    elements: int
    differing: int
    nonfinite: int
    max_abs: float | None
    relative_l2: float | None
    nonfinite_after: int = 0


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Name and type of a tensor on one side."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    ``kind``: "added", "removed", "shape", "dtype", "changed", or "undecided" (checksums are missing and
    values were not read). ``values`` quantifies compared values of one shape; for "dtype" all elements may be
    equal. ``fqn`` is the name in the second checkpoint, if present.
    """

    fqn: str
    kind: DifferenceKind
    before: TensorFacts | None
    after: TensorFacts | None
    values: ValueDifference | None = None


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A value that differs: ``kind`` is "added", "removed", "changed" or "undecided".

    ``before`` and ``after`` are plain data; None if absent or pickled.
    """

    fqn: str
    kind: str
    before: Any = None
    after: Any = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of `diff`; ``equal`` names equal tensors, ``equal_objects`` counts equal values.

    ``bytes_read`` counts both sides without indexes; 0 if checksums decide everything.
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
        """Return True if nothing differs or is undecided."""
        return not self.tensors and not self.objects


@plain_errors
def diff(
    a: str | os.PathLike[str] | TensorReader,
    b: str | os.PathLike[str] | TensorReader,
    *,
    values: bool = True,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options_of_b: Mapping[str, Any] | None = None,
    progress: ReportBytes | None = None,
) -> Difference:
    """Compare the checkpoint ``b`` with ``a``, the earlier one.

    Tensors with equal digests or checksums are not read: a flipped bit stays unnoticed, but their files must
    exist with the committed sizes. Memory is bounded by about 300 MiB.

    Args:
        a: Path or URL of a checkpoint or file of any format, or an open reader, which stays open.
        b: The later checkpoint, of any format and sharding.
        values: False reads no payload and compares names, shapes, dtypes and checksums.
        only: Names or shell globs in ``b``; a name includes everything below.
        exclude: Names or shell globs to leave out.
        rename: Rules for the names of ``a``, as for `dcp.load`.
        storage_options: Options of the URLs' file systems, as for `dcp.save`.
        options_of_b: Options for ``b`` alone.
        progress: Function of (bytes done, total bytes).

    Returns:
        Differing tensors and values, and the names of equal ones.

    Raises:
        PlanError: Nothing is selected, or two names become equal.
        CheckpointNotFoundError: No committed checkpoint exists at one of the places.
        CorruptCheckpointError: Stored bytes differ from the committed checksums.
        StorageError: The storage cannot be read.
    """
    options_of_b = storage_options if options_of_b is None else options_of_b
    selection, renamed = Selection.of(only, exclude), renamer(rename)
    with opened(a, storage_options) as first, opened(b, options_of_b) as second:
        tensors = _names(first.index.fqns, second.index.fqns, selection, renamed)
        objects = _names(_object_names(first.index), _object_names(second.index), selection, renamed)
        if not tensors and not objects and selection is not None:  # patterns are easily mistyped
            where = f"{first.name}, {second.name}: the patterns ({selection})"
            after = "; they select names after the renaming" if rename else ""
            raise PlanError(f"{where} select nothing; patterns are shell globs such as 'model.*'{after}")
        first.check_files(name for name, _ in (*tensors, *objects) if name is not None)
        second.check_files(name for _, name in (*tensors, *objects) if name is not None)
        found = _compare_tensors(first, second, tensors, progress, values=values)
        changed_objects = _compare_objects(first, second, objects, values=values)
        return Difference(
            first.name,
            second.name,
            tuple(one for one in found if one is not None),
            tuple(name or "" for (_, name), one in zip(tensors, found, strict=True) if one is None),
            tuple(changed_objects),
            len(objects) - len(changed_objects),
            first.bytes_read + second.bytes_read,
        )


def _names(
    a: Iterable[str],
    b: Iterable[str],
    selection: Selection | None,
    renamed: Callable[[str], str] | None,
) -> list[tuple[str | None, str | None]]:
    """Return selected (name in a, name in b), None if absent: first in the order of a, then others."""
    names: dict[str, str] = {}
    for fqn in a:
        name = fqn if renamed is None else renamed(fqn)
        if names.setdefault(name, fqn) != fqn:
            raise PlanError(f"rename maps both {names[name]!r} and {fqn!r} to {name!r}", fqn=fqn)
    others = dict.fromkeys(b)
    return [
        (names.get(name), name if name in others else None)
        for name in {**names, **others}
        if selection is None or selection.selects(name)
    ]


# -- tensors, by the indexes ---------------------------------------------------------------------------------


def _compare_tensors(
    a: TensorReader,
    b: TensorReader,
    names: Iterable[tuple[str | None, str | None]],
    progress: ReportBytes | None,
    *,
    values: bool,
) -> list[TensorDifference | None]:
    """Return the difference of each of ``names``, or None; reads as little as possible."""
    found: list[TensorDifference | None] = []
    compared: dict[_Rows, int] = {}
    for place, (first, second) in enumerate(names):
        before, after = _facts(a.index, first), _facts(b.index, second)
        kind: DifferenceKind | None = None
        if before is None or after is None:
            kind = "added" if before is None else "removed"
        elif before.shape != after.shape:
            kind = "shape"
        else:
            rows = a.index.position[before.fqn], b.index.position[after.fqn]
            kind = _kind_of_alike(a, b, rows) if before.dtype == after.dtype else "dtype"
            dtypes = a.index.dtype(rows[0]), b.index.dtype(rows[1])
            is_odd = any(is_opaque(dtype) or dtype.name == "float4_e2m1fn_x2" for dtype in dtypes)
            if kind and values and (dtypes[0] == dtypes[1] or not is_odd):
                compared[rows] = place
        found.append(kind and TensorDifference(second or first or "", kind, before, after))
    for rows, value in _compare_values(a, b, [*compared], progress):
        known = found[compared[rows]]
        if known is not None and known.kind == "dtype":
            found[compared[rows]] = replace(known, values=value)
        elif known is not None:
            changed = replace(known, kind="changed", values=value)
            found[compared[rows]] = changed if value.differing else None
    return found


def _facts(index: CheckpointIndex, fqn: str | None) -> TensorFacts | None:
    if fqn is None:
        return None
    row = index.position[fqn]
    return TensorFacts(fqn, index.dtype(row).name, index.shape(row))


def _kind_of_alike(a: TensorReader, b: TensorReader, rows: _Rows) -> DifferenceKind | None:
    """Compare tensors of one dtype and shape by the indexes; return None for equal ones."""
    if 0 in a.index.shape(rows[0]):
        return None
    digests = a.index.digest(rows[0]), b.index.digest(rows[1])
    if None not in digests:
        return None if digests[0] == digests[1] else "changed"
    same: bool | None
    chunks = _pairs_of_chunks(a, b, rows)
    if chunks is not None:
        known = [_same_payload(a, b, *both) for both in chunks]
        same = None if None in known else all(known)
    else:
        crcs = _whole_crc(a, rows[0]), _whole_crc(b, rows[1])
        same = None if None in crcs else crcs[0] == crcs[1]
    return None if same else "undecided" if same is None else "changed"


def _pairs_of_chunks(a: TensorReader, b: TensorReader, rows: _Rows) -> list[tuple[int, int]] | None:
    """Return the chunks with equal boxes on both sides; None if boxes differ."""
    first, second = _chunks_of_boxes(a, rows[0]), _chunks_of_boxes(b, rows[1])
    if first is None or second is None or first.keys() != second.keys():
        return None
    return [(chunk, second[box]) for box, chunk in first.items()]


def _chunks_of_boxes(reader: TensorReader, row: int) -> dict[Box, int] | None:
    """Return the chunks by their boxes; None if chunks overlap."""
    parts = reader.parts(row)
    if any(reader.index.box(chunk) != box for chunk, box in parts):
        return None
    return {box: chunk for chunk, box in parts}


def _same_payload(a: TensorReader, b: TensorReader, chunk_a: int, chunk_b: int) -> bool | None:
    """Compare payloads by checksums; return None if these do not decide."""
    blocks = a.index.block_crcs(chunk_a), b.index.block_crcs(chunk_b)
    if len(blocks[0]) and len(blocks[1]):
        return bool((blocks[0] == blocks[1]).all())
    layout = a.layout_of(chunk_a)
    if layout != b.layout_of(chunk_b):
        return None
    whole = a.payload_crc(chunk_a), b.payload_crc(chunk_b)
    if None in whole:
        return None
    # non-dense payloads may have different bytes between the elements
    return True if whole[0] == whole[1] else False if layout is None else None


def _whole_crc(reader: TensorReader, row: int) -> int | None:
    """Return the CRC-32 of a tensor in C order, if its chunks are consecutive."""
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


# -- tensors, by the values ----------------------------------------------------------------------------------


def _compare_values(
    a: TensorReader, b: TensorReader, compared: list[_Rows], progress: ReportBytes | None
) -> Iterator[tuple[_Rows, ValueDifference]]:
    """Read both sides of tensors and yield differences, tensors with equal boxes first."""
    done_bytes = 0
    total_bytes = sum(a.tensor_bytes(row) + b.tensor_bytes(other) for row, other in compared)
    alike = [rows for rows in compared if _are_cut_alike(a, b, rows)]
    others = sorted({*compared} - {*alike})
    blocks = itertools.chain(
        _blocks(a, b, alike), ((rows, *both) for rows in others for both in _slabs(a, b, rows))
    )
    for rows, some in itertools.groupby(blocks, itemgetter(0)):
        deltas = _Deltas(a.index.dtype(rows[0]), b.index.dtype(rows[1]))
        for _, first, second in some:
            deltas.add(first, second)
            done_bytes += first.nbytes + second.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)
        yield rows, deltas.result()


def _are_cut_alike(a: TensorReader, b: TensorReader, rows: _Rows) -> bool:
    chunks = _pairs_of_chunks(a, b, rows)
    if chunks is None or a.index.dtype(rows[0]).itemsize != b.index.dtype(rows[1]).itemsize:
        return False
    return all(a.is_c_ordered(first) and b.is_c_ordered(second) for first, second in chunks)


def _blocks(a: TensorReader, b: TensorReader, alike: list[_Rows]) -> Iterator[tuple[_Rows, Array, Array]]:
    """Yield blocks of tensors with equal boxes, from two verified streams."""
    others = dict(alike)
    with (
        contextlib.closing(a.stream(others)) as first,
        contextlib.closing(b.stream(others.values())) as second,
    ):
        for one, other in zip(first, second, strict=True):
            yield (one.row, other.row), one.array, other.array


def _slabs(a: TensorReader, b: TensorReader, rows: _Rows) -> Iterator[tuple[Array, Array]]:
    """Yield equal boxes of both sides for different chunks, along the stored order."""
    for reader, row, other, other_row in ((a, rows[0], b, rows[1]), (b, rows[1], a, rows[0])):
        if not all(reader.is_c_ordered(chunk) for chunk, _ in reader.parts(row)):
            for tile in reader.stream([row], _SLAB_BYTES):
                array = other.read(other_row, Box(tile.offsets, tile.array.shape).slices)
                yield (tile.array, array) if reader is a else (array, tile.array)
            return
    itemsize = max(a.index.dtype(rows[0]).itemsize, b.index.dtype(rows[1]).itemsize)
    for box in split_box(Box.whole(a.index.shape(rows[0])), _SLAB_BYTES // itemsize):
        yield a.read(rows[0], box.slices), b.read(rows[1], box.slices)


class _Deltas:
    """Collects pairs of arrays of one shape in `elements.stored_dtype`, of comparable dtypes."""

    def __init__(self, first: Dtype, second: Dtype) -> None:
        self._first, self._second = first, second
        self._compares_bits = first == second
        self._has_values = not is_opaque(first)
        self._is_wide = first == second and is_integral(first) and first.itemsize == 8
        self.elements = self.differing = 0
        self._nonfinite = self._nonfinite_after = self._finite = 0
        self._max_abs = self._delta_squares = self._squares = 0.0

    def add(self, first: Array, second: Array) -> None:
        """Add a pair."""
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
            deltas: Array
            if self._is_wide:  # integers of 64 bits, which float64 would round before it subtracts them
                up = first.astype(np.uint64) - second.astype(np.uint64)  # modulo 2**64
                deltas = np.where(first > second, up, np.uint64(0) - up).astype(np.float64)
            else:
                deltas = np.abs(a - b)
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


# -- values that are no tensors ------------------------------------------------------------------------------


def _object_names(index: CheckpointIndex) -> list[str]:
    """Return names of all values, including pickled ones."""
    refused = index.provenance.get("refused_objects")
    names = refused if isinstance(refused, Mapping) else ()
    return [*index.objects.fqns, *(name for name in names if isinstance(name, str))]


def _compare_objects(
    a: TensorReader, b: TensorReader, names: Iterable[tuple[str | None, str | None]], *, values: bool
) -> list[ObjectDifference]:
    """Compare the values ``names`` of ``a`` and ``b`` (None if absent).

    Encodings in the indexes need no read. Others are read only with ``values``, else they are "undecided".
    """
    before, after = _Values(a), _Values(b)
    found = []
    for first, second in names:
        same, kind = None, "removed" if second is None else "added"
        if first is not None and second is not None:
            same = _are_same(before, after, first, second, values=values)
            kind = "undecided" if same is None else "changed"
        if not same:
            shown = before.value(first, read=values), after.value(second, read=values)
            found.append(ObjectDifference(second or first or "", kind, *shown))
    return found


def _are_same(a: _Values, b: _Values, first: str, second: str, *, values: bool) -> bool | None:
    """Compare two values; return None if the indexes do not decide, and no values were read or decoded."""
    (value, stamp), (other_value, other_stamp) = a.noted(first), b.noted(second)
    if value is not None and other_value is not None:
        return value == other_value
    if stamp is not None and stamp == other_stamp:
        return True
    row, other = (a.rows.get(first), b.rows.get(second)) if values else (None, None)
    if row is None or other is None:
        return None
    if row.is_plain and other.is_plain:
        limit = _MAX_ENCODED_BYTES
        return encode_value(row.value, limit_bytes=limit) == encode_value(other.value, limit_bytes=limit)
    return not row.is_plain and not other.is_plain and a.pickle_print(first) == b.pickle_print(second)


class _Values:
    """Values of one checkpoint; pickles are read on demand."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader, self._objects = reader, reader.index.objects

    @cached_property
    def rows(self) -> dict[str, ObjectRow]:
        """All values, plain ones decoded, without those refused on opening."""
        self._reader.other_bytes += int(self._objects.lengths[self._objects.plain == UNKNOWN].sum())
        return {row.fqn: row for row in object_rows(self._reader.store, self._reader.index)}

    def noted(self, fqn: str) -> tuple[bytes | None, tuple[int, int] | None]:
        """Return a plain value from the index, and length and CRC-32 of a record; None if absent."""
        at, objects = self._objects.position.get(fqn), self._objects
        if at is None:
            return None, None
        plain, crc = int(objects.plain[at]), int(objects.crcs[at])
        stamp = None if crc == UNKNOWN else (int(objects.lengths[at]), crc)
        return None if plain == UNKNOWN else objects.values[plain], stamp

    def value(self, fqn: str | None, *, read: bool) -> Any:
        """Return a plain value, read only if allowed, or None."""
        encoded = None if fqn is None else self.noted(fqn)[0]
        if encoded is not None:
            return decode_value(encoded)
        row = self.rows.get(fqn) if read and fqn is not None else None
        return row.value if row is not None and row.is_plain else None

    def pickle_print(self, fqn: str) -> frozenset[tuple[bytes, int, int]]:
        """Return a fingerprint of a pickle: name, size and CRC-32 of the record's entries."""
        at, objects = self._objects.position[fqn], self._objects
        length = int(objects.lengths[at])
        window = self._reader.window(int(objects.files[at]), int(objects.offsets[at]), length)

        def crc_of(begin: int, size_bytes: int) -> int:
            crc, end = 0, begin + size_bytes
            for position in range(begin, end, BLOCK_BYTES):
                crc = crc32(window.get(position, min(BLOCK_BYTES, end - position)), crc)
            return crc

        try:
            entries = read_directory(window)
        except CheckpointFormatError:  # a bare pickle
            return frozenset([(b"", length, crc_of(0, length))])
        found = []
        for name, entry in entries.items():
            inner = name.partition(b"/")[2]
            if inner == b"data.pkl" or inner.startswith(b"data/"):
                crc = entry.crc32 or crc_of(entry_start(window, entry), entry.size)
                found.append((inner, entry.size, crc))
        return frozenset(found)
