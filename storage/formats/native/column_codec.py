"""The packing of columns in the manifest: narrow integers, strings and byte rows as msgpack values.

A column of integers is ``[count, first, base, width, packing, data]``. ``data`` holds little-endian unsigned
residuals of ``width`` bytes (0: none, all are zero; 8: signed, base 0). With ``first`` nil they are
``value - base``; otherwise ``first`` is the first value and they are ``value[i] - value[i - 1] - base``, one
fewer than ``count``. ``packing`` 1 means that ``data`` is a zlib stream. Arithmetic is modulo 2**64.

Decoding trusts nothing: a `Budget` bounds what a small input can make of memory before anything is allocated.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import Int64, starts

__all__ = [
    "Budget",
    "ColumnEncoder",
    "check_counts",
    "decode_bytes",
    "decode_column",
    "decode_rows",
    "decode_strings",
]

BUDGET_FLOOR_BYTES: Final = 32 << 20
BUDGET_RATIO: Final = 256
"""A manifest of n bytes decodes to at most BUDGET_FLOOR_BYTES + BUDGET_RATIO * n bytes of columns."""

_STRING_OVERHEAD_BYTES: Final = 64
_PACKING_WORTHWHILE_BYTES: Final = 4096
_SAMPLE_BYTES: Final = 1 << 16
_RAW, _ZLIB = 0, 1
_InflateError: Final = cast(type[Exception], isal_zlib.error)  # the stubs declare an instance
_WIDTHS: Final = {0: "<u1", 1: "<u1", 2: "<u2", 4: "<u4", 8: "<i8"}
_WIDTH_OF_BITS: Final = (*[1] * 9, *[2] * 8, *[4] * 16, *[8] * 32)
_INTEGERS: Final = frozenset({int})


class Budget:
    """Bytes that decoding what has ``encoded_bytes`` may still allocate."""

    def __init__(self, encoded_bytes: int) -> None:
        self._left = BUDGET_FLOOR_BYTES + BUDGET_RATIO * encoded_bytes

    def spend(self, size_bytes: int) -> None:
        """Take ``size_bytes``; CheckpointFormatError once the encoding claims more than it could need."""
        self._left -= size_bytes
        if self._left < 0:
            raise CheckpointFormatError(
                "the manifest claims to hold far more than its size can; it is hostile or damaged"
            )


class ColumnEncoder:
    """Encodes columns and counts in ``decoded_bytes`` what a reader's `Budget` will be charged for them.

    ``compact=False`` avoids the encodings that can expand without bound.
    """

    def __init__(self, *, compact: bool = True) -> None:
        self._compact = compact
        self._longest: tuple[list[str], list[Any], int] = [], [], 0
        self.decoded_bytes = 0

    def column(self, values: npt.ArrayLike) -> list[Any]:
        """Encode a column of integers."""
        column = np.ascontiguousarray(values).astype(np.int64, copy=False)
        self.decoded_bytes += 8 * len(column)
        first, stored = None, column
        base, width = _base_and_width(column)
        if width and len(column) > 1:
            steps = np.diff(column)
            step_base, step_width = _base_and_width(steps)
            if step_width < width:
                first, stored, base, width = int(column[0]), steps, step_base, step_width
        if width == 0 and not self._compact:
            width = 1
        data = (stored - base).astype(_WIDTHS[width]).tobytes() if width else b""
        return [len(column), first, base, width, *self.blob(data)[1:]]

    def blob(self, data: bytes) -> list[Any]:
        """Encode a byte string that may pay compressing: ``[size, packing, data]``."""
        sample = data[:_SAMPLE_BYTES]
        is_long = self._compact and len(data) >= _PACKING_WORTHWHILE_BYTES
        if not is_long or len(isal_zlib.compress(sample, 1)) > len(sample) * 7 // 8:
            return [len(data), _RAW, data]
        self.decoded_bytes += len(data)
        return [len(data), _ZLIB, isal_zlib.compress(data, 1)]

    def rows(self, rows: Sequence[bytes] | Sequence[str], joined: bytes | None = None) -> list[Any]:
        """Encode byte strings: ``[lengths, joined bytes]``; of ASCII, with the bytes ``joined``."""
        self.decoded_bytes += _STRING_OVERHEAD_BYTES * len(rows)
        lengths = self.column(np.fromiter(map(len, rows), np.int64, len(rows)))
        return [lengths, self.blob(b"".join(cast(Sequence[bytes], rows)) if joined is None else joined)]

    def strings(self, texts: Sequence[str]) -> list[Any]:
        """Encode strings as `rows` of UTF-8; lone surrogates, which Python's str may hold, pass (WTF-8)."""
        listed, before = list(texts), self.decoded_bytes
        if listed == self._longest[0]:  # as a flat state dict has, three times
            self.decoded_bytes += self._longest[2]
            return self._longest[1] or self.rows([])
        joined = "".join(listed)
        if joined.isascii():
            encoded = self.rows(listed, joined.encode())
        else:
            encoded = self.rows([text.encode("utf-8", "surrogatepass") for text in listed])
        if len(listed) > len(self._longest[0]):
            self._longest = listed, encoded, self.decoded_bytes - before
        return encoded

    def exceeds_budget_of(self, data: bytes) -> bool:
        """Return whether readers with a `Budget` of the length of ``data`` would refuse what was encoded."""
        return self.decoded_bytes > BUDGET_FLOOR_BYTES + BUDGET_RATIO * len(data)


def _base_and_width(values: Int64) -> tuple[int, int]:
    if len(values) == 0:
        return 0, 0
    low, high = int(values.min()), int(values.max())
    if low == high:
        return low, 0
    width = _WIDTH_OF_BITS[(high - low).bit_length()]
    # without a base where that takes no more room
    is_plain = width == 8 or (low >= 0 and _WIDTH_OF_BITS[high.bit_length()] == width)
    return (0 if is_plain else low), width


def decode_column(encoded: Any, budget: Budget) -> Int64:
    """Decode the integers of a column."""
    count, first, base, width, packing, data = _fields(encoded, 6)
    numbers = (count, base, 0 if first is None else first, width)
    if not _INTEGERS.issuperset(map(type, numbers)) or not 0 <= count < 1 << 48 or width not in _WIDTHS:
        raise CheckpointFormatError("a column of the manifest has a malformed head")
    if max(numbers[1:3]) >= 1 << 63 or min(numbers[1:3]) < -(1 << 63) or (first is not None and not count):
        raise CheckpointFormatError("a column of the manifest has a malformed first value or base")
    budget.spend(8 * count)
    stored = count if first is None else count - 1
    raw = _unpack(packing, data, stored * width, budget)
    values = np.frombuffer(raw, _WIDTHS[width]).astype(np.int64) if width else np.zeros(stored, np.int64)
    if base:
        values += np.int64(base)
    if first is None:
        return values
    values = np.concatenate((np.array([first], np.int64), values))
    return np.cumsum(values, out=values)


def decode_bytes(encoded: Any, budget: Budget) -> bytes:
    """Decode a byte string of `ColumnEncoder.blob`."""
    size, packing, data = _fields(encoded, 3)
    if type(size) is not int or not 0 <= size < 1 << 48:
        raise CheckpointFormatError("a byte string of the manifest has a malformed size")
    return _unpack(packing, data, size, budget)


def decode_rows(encoded: Any, budget: Budget) -> list[bytes]:
    """Decode the byte strings of `ColumnEncoder.rows`."""
    blob, places = _rows(encoded, budget)
    return list(map(blob.__getitem__, places))


def decode_strings(encoded: Any, budget: Budget) -> list[str]:
    """Decode the strings of `ColumnEncoder.strings`."""
    blob, places = _rows(encoded, budget)
    if blob.isascii():
        return list(map(blob.decode("ascii").__getitem__, places))
    try:
        return [blob[place].decode("utf-8", "surrogatepass") for place in places]
    except UnicodeDecodeError as error:
        raise CheckpointFormatError("a name in the manifest is not UTF-8") from error


def _rows(encoded: Any, budget: Budget) -> tuple[bytes, Iterator[slice]]:
    lengths_column, blob_field = _fields(encoded, 2)
    lengths = decode_column(lengths_column, budget)
    budget.spend(_STRING_OVERHEAD_BYTES * len(lengths))
    blob = decode_bytes(blob_field, budget)
    check_counts(lengths, len(blob), "lengths of strings")
    start = starts(lengths).tolist()
    return blob, map(slice, start[:-1], start[1:])


def check_counts(counts: Int64, total: int, what: str) -> None:
    """Raise CheckpointFormatError unless ``counts`` are not negative and sum up to ``total``."""
    # Each count is bounded first, so that the sum of a column that fits in memory cannot wrap around.
    if len(counts) and (int(counts.min()) < 0 or int(counts.max()) > total):
        raise CheckpointFormatError(f"{what} are out of range in the manifest")
    if int(counts.sum()) != total:
        raise CheckpointFormatError(f"{what} do not sum up to {total} in the manifest")


def _unpack(packing: Any, data: Any, size: int, budget: Budget) -> bytes:
    """Return the ``size`` bytes that were packed as ``data``."""
    if not isinstance(data, bytes):
        raise CheckpointFormatError("a column of the manifest has no bytes")
    if packing == _ZLIB:
        budget.spend(size)
        stream = isal_zlib.decompressobj()
        try:
            plain: bytes = stream.decompress(data, size + 1)
        except _InflateError as error:
            raise CheckpointFormatError(f"a column of the manifest is not a zlib stream: {error}") from error
        if not stream.eof or stream.unused_data:
            raise CheckpointFormatError(f"a column of the manifest does not unpack to its {size} bytes")
    elif packing == _RAW:
        plain = data
    else:
        raise CheckpointFormatError(f"a column of the manifest is packed in an unknown way ({packing!r})")
    if len(plain) != size:
        raise CheckpointFormatError(f"a column of the manifest has {len(plain)} bytes instead of {size}")
    return plain


def _fields(encoded: Any, count: int) -> list[Any]:
    if not isinstance(encoded, list) or len(encoded) != count:
        raise CheckpointFormatError(f"a column of the manifest is not an array of {count} fields")
    return encoded
