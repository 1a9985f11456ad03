"""Differences between values that are no tensors of two checkpoints: by their encodings, without running
any.

Plain and other harmless values are compared by value and exact type (1 and 1.0 differ, NaN equals itself bit
by bit). What needs code, or is large, is compared by its pickle: two pickles may differ and still mean one
value. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from dcp.inspection.entries import ObjectRow, object_rows
from dcp.inspection.values.tensor_reading import TensorReader
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.archive import Window, entry_start, read_directory
from dcp.storage.formats.torch.python_values import decode_value, encode_value

_MAX_ENCODED_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A value that is not the same in both: ``kind`` is "added", "removed", "changed" or "undecided".

    ``before`` and ``after`` count only where they are plain data; None where they are not there or pickled.
    """

    fqn: str
    kind: str
    before: Any = None
    after: Any = None


def object_names(index: CheckpointIndex) -> list[str]:
    """Return names of all values, also of those that were not decoded because they need code."""
    refused = index.provenance.get("refused_objects")
    names = refused if isinstance(refused, Mapping) else ()
    return [*index.objects.fqns, *(name for name in names if isinstance(name, str))]


def compare_objects(
    a: TensorReader, b: TensorReader, pairs: Iterable[tuple[str | None, str | None]], *, values: bool
) -> list[ObjectDifference]:
    """Compare the values that ``pairs`` names in ``a`` and ``b`` (None where one lacks it).

    Nothing is read for those whose encodings the indexes have; for others only with ``values``, else they are
    "undecided".
    """
    before, after = _Side(a), _Side(b)
    found = []
    for first, second in pairs:
        same, kind = None, "removed" if second is None else "added"
        if first is not None and second is not None:
            same = _are_same(before, after, first, second, values=values)
            kind = "undecided" if same is None else "changed"
        if not same:
            shown = before.value(first, read=values), after.value(second, read=values)
            found.append(ObjectDifference(second or first or "", kind, *shown))
    return found


def _are_same(a: _Side, b: _Side, first: str, second: str, *, values: bool) -> bool | None:
    """Return None where the indexes do not tell, and nothing is to be read or was decoded."""
    encoded = a.encoded(first), b.encoded(second)
    if None not in encoded:
        return encoded[0] == encoded[1]
    stamps = a.stamp(first), b.stamp(second)
    if None not in stamps and stamps[0] == stamps[1]:
        return True
    row, other = (a.rows.get(first), b.rows.get(second)) if values else (None, None)
    if row is None or other is None:
        return None
    if row.is_plain and other.is_plain:
        return _encoded(row.value) == _encoded(other.value)
    return not row.is_plain and not other.is_plain and a.pickle_print(first) == b.pickle_print(second)


def _encoded(value: Any) -> bytes | None:
    return encode_value(value, limit_bytes=_MAX_ENCODED_BYTES)


class _Side:
    """The values of one checkpoint; what is pickled is read when it is first asked for."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader, self._objects = reader, reader.index.objects

    @cached_property
    def rows(self) -> dict[str, ObjectRow]:
        """All values, decoded if they are plain, but for those refused when the file was opened."""
        self._reader.count_bytes(int(self._objects.lengths[self._objects.plain == UNKNOWN].sum()))
        return {row.fqn: row for row in object_rows(self._reader.store, self._reader.index)}

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

    def value(self, fqn: str | None, *, read: bool) -> Any:
        """Return a plain value, read only if allowed; else None."""
        encoded = None if fqn is None else self.encoded(fqn)
        if encoded is not None:
            return decode_value(encoded)
        row = self.rows.get(fqn) if read and fqn is not None else None
        return row.value if row is not None and row.is_plain else None

    def pickle_print(self, fqn: str) -> frozenset[tuple[bytes, int, int]]:
        """Return a print by which pickles differ: name, size and CRC-32 of a record's entries that hold
        the value."""
        at, objects = self._objects.position[fqn], self._objects
        length = int(objects.lengths[at])
        window = self._reader.window(int(objects.files[at]), int(objects.offsets[at]), length)
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
