"""Differences between values that are no tensors of two checkpoints: by their encodings, without running
any.

Plain and other harmless values are compared by value and exact type (1 and 1.0 differ, NaN equals itself bit
by bit). What needs code, or is large, is compared by its pickle: two pickles may differ and still mean one
value. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from dcp.inspection.entries import ObjectRow, object_rows
from dcp.inspection.values.tensor_reading import TensorReader
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.archive import Window, entry_start, read_directory
from dcp.storage.formats.torch.python_values import decode_value, encode_value

__all__ = ["ObjectDifference", "ObjectKind", "compare_objects", "object_names"]

ObjectKind = Literal["added", "removed", "changed", "undecided"]

_MAX_ENCODED_BYTES: Final = 1 << 30
_Print = frozenset[tuple[bytes, int, int]]


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A value that is not the same in both. ``before`` and ``after`` count only where they are plain data;
    None where they are not there or pickled."""

    fqn: str
    kind: ObjectKind
    before: Any = None
    after: Any = None


def object_names(index: CheckpointIndex) -> list[str]:
    """Return names of all values, also of those that were not decoded because they need code."""
    return [*index.objects.fqns, *_refused(index)]


def _refused(index: CheckpointIndex) -> list[str]:
    refused = index.provenance.get("refused_objects")
    return [name for name in refused if isinstance(name, str)] if isinstance(refused, Mapping) else []


def compare_objects(
    a: TensorReader, b: TensorReader, pairs: Iterable[tuple[str | None, str | None]], *, values: bool
) -> list[ObjectDifference]:
    """Compare the values that ``pairs`` names in ``a`` and ``b`` (None where one lacks it).

    Nothing is read for those whose encodings the indexes have; for others only with ``values``, else they are
    "undecided".
    """
    sides = _Side(a), _Side(b)
    found = []
    for first, second in pairs:
        if second is None or first is None:
            kind: ObjectKind = "removed" if second is None else "added"
            before = sides[0].value(first, read=values) if first is not None else None
            after = sides[1].value(second, read=values) if second is not None else None
            found.append(ObjectDifference(first or second or "", kind, before, after))
            continue
        same = _same_by_index(sides, first, second)
        if same is None and values:
            same = _same_by_reading(sides, first, second)
        if not same:
            kind = "undecided" if same is None else "changed"
            before, after = sides[0].value(first, read=values), sides[1].value(second, read=values)
            found.append(ObjectDifference(second, kind, before, after))
    return found


def _same_by_index(sides: tuple[_Side, _Side], first: str, second: str) -> bool | None:
    """Return None where the indexes do not tell."""
    encoded = sides[0].encoded(first), sides[1].encoded(second)
    if None not in encoded:
        return encoded[0] == encoded[1]
    stamps = sides[0].stamp(first), sides[1].stamp(second)
    return True if None not in stamps and stamps[0] == stamps[1] else None


def _same_by_reading(sides: tuple[_Side, _Side], first: str, second: str) -> bool | None:
    rows = sides[0].row(first), sides[1].row(second)
    if rows[0] is None or rows[1] is None:
        return None
    if rows[0].is_plain and rows[1].is_plain:
        return _encoded(rows[0].value) == _encoded(rows[1].value)
    if rows[0].is_plain or rows[1].is_plain:
        return False
    return sides[0].pickle_print(first) == sides[1].pickle_print(second)


def _encoded(value: Any) -> bytes | None:
    return encode_value(value, limit_bytes=_MAX_ENCODED_BYTES)


class _Side:
    """The values of one checkpoint; what is pickled is read when it is first asked for."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._objects = reader.index.objects
        self._rows: dict[str, ObjectRow] | None = None

    def encoded(self, fqn: str) -> bytes | None:
        """Return a plain value as the index has it."""
        at = self._objects.position.get(fqn)
        plain = UNKNOWN if at is None else int(self._objects.plain[at])
        return None if plain == UNKNOWN else self._objects.values[plain]

    def stamp(self, fqn: str) -> tuple[int, int] | None:
        """Return length and CRC-32 of a record."""
        at = self._objects.position.get(fqn)
        if at is None or self._objects.crcs[at] == UNKNOWN:
            return None
        return int(self._objects.lengths[at]), int(self._objects.crcs[at])

    def value(self, fqn: str, *, read: bool) -> Any:
        """Return a plain value, read only if allowed; else None."""
        encoded = self.encoded(fqn)
        if encoded is not None:
            return decode_value(encoded)
        row = self.row(fqn) if read else None
        return row.value if row is not None and row.is_plain else None

    def row(self, fqn: str) -> ObjectRow | None:
        """Return a value, decoded if it is plain; None for what was refused when the file was opened."""
        if self._rows is None:
            index = self._reader.index
            self._rows = {row.fqn: row for row in object_rows(self._reader.store, index)}
            pickled = self._objects.plain == UNKNOWN
            self._reader.count_bytes(int(self._objects.lengths[pickled].sum()))
        return self._rows.get(fqn)

    def pickle_print(self, fqn: str) -> _Print:
        """Return a print by which pickles differ: name, size and CRC-32 of a record's entries that hold
        the value."""
        at = self._objects.position[fqn]
        file, offset, length = (
            int(column[at]) for column in (self._objects.files, self._objects.offsets, self._objects.lengths)
        )
        window = self._reader.window(file, offset, length)
        try:
            entries = read_directory(window)
        except CheckpointFormatError:  # a bare pickle
            return frozenset([(b"", length, _crc(window, 0, length))])
        found = []
        for name, entry in entries.items():
            inner = name.partition(b"/")[2]
            if inner == b"data.pkl" or inner.startswith(b"data/"):
                crc = entry.crc32 or _crc(window, entry_start(window, entry), entry.size)
                found.append((inner, entry.size, crc))
        return frozenset(found)


def _crc(window: Window, begin: int, size_bytes: int) -> int:
    crc = 0
    for at in range(begin, begin + size_bytes, BLOCK_BYTES):
        crc = crc32(window.get(at, min(BLOCK_BYTES, begin + size_bytes - at)), crc)
    return crc
