"""How the manifest packs columns: narrow integers, strings and byte rows as msgpack values.

A column of integers is ``[count, first, base, width, packing, data]``. ``data`` holds little-endian unsigned
residuals of ``width`` bytes (0: none, all are zero; 8: signed, base 0). With ``first`` nil they are
``value - base``; otherwise ``first`` is the first value and they are ``value[i] - value[i - 1] - base``, one
fewer than ``count``. ``packing`` 1 means that ``data`` is a zlib stream. Arithmetic is modulo 2**64.

Decoding trusts nothing: a `Budget` bounds what a small input can make of memory before anything is allocated.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import Int64, starts

__all__ = [
    "Budget",
    "ColumnEncoder",
    "budget_bytes",
    "check_counts",
    "decode_bytes",
    "decode_column",
    "decode_rows",
    "decode_strings",
    "encode_within_budget",
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


class Budget:
    """Bytes that decoding what has ``encoded_bytes`` may still allocate."""

    def __init__(self, encoded_bytes: int) -> None:
        self._left = budget_bytes(encoded_bytes)

    def spend(self, size_bytes: int) -> None:
        """Take ``size_bytes``; CheckpointFormatError once the encoding claims more than it could need."""
        self._left -= size_bytes
        if self._left < 0:
            raise CheckpointFormatError(
                "the manifest claims to hold far more than its size can; it is hostile or damaged"
            )


def budget_bytes(encoded_bytes: int) -> int:
    """What a manifest of ``encoded_bytes`` may decode to."""
    return BUDGET_FLOOR_BYTES + BUDGET_RATIO * encoded_bytes


class ColumnEncoder:
    """Encodes columns and counts in ``decoded_bytes`` what a reader's `Budget` will be charged for them.

    ``compact=False`` avoids the encodings that can expand without bound: see `encode_within_budget`.
    """

    def __init__(self, *, compact: bool = True) -> None:
        self._compact = compact
        self._longest: tuple[list[str], list[Any], int] | None = None
        self.decoded_bytes = 0

    def column(self, values: npt.ArrayLike) -> list[Any]:
        """A column of integers."""
        column = np.ascontiguousarray(values).astype(np.int64, copy=False)
        self.decoded_bytes += 8 * len(column)
        first: int | None = None
        base, width, residuals = _residuals(column)
        if width and len(column) > 1:
            steps = np.diff(column)
            step_base, step_width = _base_and_width(steps)
            if step_width < width:
                first, width, base, residuals = int(column[0]), step_width, step_base, steps
        if width == 0 and not self._compact:
            width = 1
        data = (residuals - base).astype(_WIDTHS[width]).tobytes() if width else b""
        packing, packed = self._pack(data)
        self.decoded_bytes += len(data) if packing == _ZLIB else 0
        return [len(column), first, base, width, packing, packed]

    def blob(self, data: bytes) -> list[Any]:
        """A byte string that may pay compressing: ``[size, packing, data]``."""
        self.decoded_bytes += len(data)
        return [len(data), *self._pack(data)]

    def rows(self, rows: Sequence[bytes]) -> list[Any]:
        """Byte strings: ``[lengths, joined bytes]``."""
        return self._rows(np.fromiter(map(len, rows), np.int64, len(rows)), b"".join(rows))

    def strings(self, texts: Sequence[str]) -> list[Any]:
        """Strings as `rows` of UTF-8; lone surrogates, which Python's str may hold, pass (WTF-8)."""
        listed, before = list(texts), self.decoded_bytes
        if self._longest is not None and listed == self._longest[0]:  # as a flat state dict has, three times
            self.decoded_bytes += self._longest[2]
            return self._longest[1]
        encoded = self._strings(listed)
        if self._longest is None or len(listed) > len(self._longest[0]):
            self._longest = listed, encoded, self.decoded_bytes - before
        return encoded

    def _strings(self, texts: list[str]) -> list[Any]:
        joined = "".join(texts)
        if joined.isascii():
            return self._rows(np.fromiter(map(len, texts), np.int64, len(texts)), joined.encode("ascii"))
        return self.rows([text.encode("utf-8", "surrogatepass") for text in texts])

    def _rows(self, lengths: Int64, joined: bytes) -> list[Any]:
        self.decoded_bytes += _STRING_OVERHEAD_BYTES * len(lengths)
        return [self.column(lengths), self.blob(joined)]

    def _pack(self, data: bytes) -> tuple[int, bytes]:
        if not self._compact or len(data) < _PACKING_WORTHWHILE_BYTES:
            return _RAW, data
        sample = data[:_SAMPLE_BYTES]
        if len(isal_zlib.compress(sample, 1)) > len(sample) * 7 // 8:
            return _RAW, data
        return _ZLIB, isal_zlib.compress(data, 1)


def encode_within_budget(encode: Callable[[ColumnEncoder], bytes]) -> bytes:
    """What ``encode`` makes with an encoder, compact unless it is so regular that readers would refuse it.

    Readers must open it with a `Budget` of its own length.
    """
    encoder = ColumnEncoder()
    data = encode(encoder)
    if encoder.decoded_bytes > budget_bytes(len(data)):
        return encode(ColumnEncoder(compact=False))
    return data


def _residuals(column: Int64) -> tuple[int, int, Int64]:
    base, width = _base_and_width(column)
    return base, width, column


def _base_and_width(values: Int64) -> tuple[int, int]:
    if len(values) == 0:
        return 0, 0
    low, high = int(values.min()), int(values.max())
    if low == high:
        return low, 0
    width = _width(high - low)
    if width == 8 or (low >= 0 and _width(high) == width):
        return 0, width
    return low, width


def _width(largest: int) -> int:
    return next((width for width in (1, 2, 4) if largest < 1 << (8 * width)), 8)


def decode_column(encoded: Any, budget: Budget) -> Int64:
    """The integers of a column."""
    count, first, base, width, packing, data = _fields(encoded, 6)
    if not _is_count(count) or type(width) is not int or width not in _WIDTHS or not _is_int64(base):
        raise CheckpointFormatError("a column of the manifest has a malformed head")
    budget.spend(8 * count)
    stored = count if first is None else max(count - 1, 0)
    raw = _unpack(packing, data, stored * width, budget)
    if first is None:
        return _add(_stored(raw, width, stored), base)
    if not _is_int64(first) or count == 0:
        raise CheckpointFormatError("a column of the manifest has a malformed first value")
    values = np.empty(count, dtype=np.int64)
    values[0] = first
    values[1:] = _add(_stored(raw, width, stored), base)
    return np.cumsum(values, out=values)


def _stored(raw: bytes, width: int, count: int) -> Int64:
    if width == 0:
        return np.zeros(count, dtype=np.int64)
    return np.frombuffer(raw, dtype=_WIDTHS[width]).astype(np.int64)


def _add(values: Int64, base: int) -> Int64:
    if base:
        values += np.int64(base)
    return values


def decode_bytes(encoded: Any, budget: Budget) -> bytes:
    """A byte string of `ColumnEncoder.blob`."""
    size, packing, data = _fields(encoded, 3)
    if not _is_count(size):
        raise CheckpointFormatError("a byte string of the manifest has a malformed size")
    return _unpack(packing, data, size, budget)


def decode_rows(encoded: Any, budget: Budget) -> list[bytes]:
    """The byte strings of `ColumnEncoder.rows`."""
    blob, positions = _rows(encoded, budget)
    return [blob[begin:end] for begin, end in pairwise(positions)]


def decode_strings(encoded: Any, budget: Budget) -> list[str]:
    """The strings of `ColumnEncoder.strings`."""
    blob, positions = _rows(encoded, budget)
    if blob.isascii():
        text = blob.decode("ascii")
        return [text[begin:end] for begin, end in pairwise(positions)]
    try:
        return [blob[begin:end].decode("utf-8", "surrogatepass") for begin, end in pairwise(positions)]
    except UnicodeDecodeError as error:
        raise CheckpointFormatError("a name in the manifest is not UTF-8") from error


def _rows(encoded: Any, budget: Budget) -> tuple[bytes, list[int]]:
    lengths_column, blob_field = _fields(encoded, 2)
    lengths = decode_column(lengths_column, budget)
    budget.spend(_STRING_OVERHEAD_BYTES * len(lengths))
    blob = decode_bytes(blob_field, budget)
    check_counts(lengths, len(blob), "lengths of strings")
    return blob, starts(lengths).tolist()


def check_counts(counts: Int64, total: int, what: str) -> None:
    """CheckpointFormatError unless ``counts`` are not negative and sum up to ``total``."""
    # Each count is bounded first, so that the sum of a column that fits in memory cannot wrap around.
    if len(counts) and (int(counts.min()) < 0 or int(counts.max()) > total):
        raise CheckpointFormatError(f"{what} are out of range in the manifest")
    if int(counts.sum()) != total:
        raise CheckpointFormatError(f"{what} do not sum up to {total} in the manifest")


def _unpack(packing: Any, data: Any, size: int, budget: Budget) -> bytes:
    if not isinstance(data, bytes):
        raise CheckpointFormatError("a column of the manifest has no bytes")
    if packing == _RAW:
        plain = data
    elif packing == _ZLIB:
        budget.spend(size)
        plain = _inflate(data, size)
    else:
        raise CheckpointFormatError(f"a column of the manifest is packed in an unknown way ({packing!r})")
    if len(plain) != size:
        raise CheckpointFormatError(f"a column of the manifest has {len(plain)} bytes instead of {size}")
    return plain


def _inflate(data: bytes, size: int) -> bytes:
    """At most ``size`` + 1 bytes of a zlib stream, which must end there."""
    stream = isal_zlib.decompressobj()
    try:
        plain: bytes = stream.decompress(data, size + 1)
    except _InflateError as error:
        raise CheckpointFormatError(f"a column of the manifest is not a zlib stream: {error}") from error
    if len(plain) != size or not stream.eof or stream.unused_data:
        raise CheckpointFormatError(f"a column of the manifest does not unpack to its {size} bytes")
    return plain


def _fields(encoded: Any, count: int) -> list[Any]:
    if not isinstance(encoded, list) or len(encoded) != count:
        raise CheckpointFormatError(f"a column of the manifest is not an array of {count} fields")
    return encoded


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63
