"""CRC-32 (the polynomial of zip and zlib), by hardware.

One checksum serves the zip entry that stock torch checks and the blocks of the manifest: `crc32_combine`
turns the CRCs of adjacent blocks into the CRC of the whole without touching the bytes again.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32 as _isal_crc32

from dcp.storage.geometry.payload_parts import BLOCK_BYTES

__all__ = ["BLOCK_BYTES", "crc32", "crc32_combine", "crc32_rows"]

crc32 = _isal_crc32
"""``crc32(data, value=0) -> int``: 34 GB/s a core where isal has its vector code, releases the GIL."""

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: bits are reflected, as in the checksum."""


def _product(first: int, second: int) -> int:
    """The product of two polynomials over GF(2), modulo that of the checksum."""
    total, bit = 0, _ONE
    while True:
        if first & bit:
            total ^= second
            if not first & (bit - 1):
                return total
        bit >>= 1
        second = (second >> 1) ^ _POLYNOMIAL if second & 1 else second >> 1


@lru_cache(maxsize=64)
def _doubled(exponent: int) -> int:
    """x to the power of ``2**exponent``."""
    if exponent == 0:
        return _ONE >> 1
    root = _doubled(exponent - 1)
    return _product(root, root)


@lru_cache(maxsize=256)
def _zeros(count: int) -> int:
    """What appending ``count`` zero bytes multiplies a checksum by."""
    power, exponent = _ONE, 3
    while count:
        if count & 1:
            power = _product(_doubled(exponent), power)
        count >>= 1
        exponent += 1
    return power


@lru_cache(maxsize=1)
def _block_of_zeros() -> tuple[int, ...]:
    """The same as a matrix for a whole block, which is by far the most frequent length: ten times faster."""
    power = _zeros(BLOCK_BYTES)
    return tuple(_product(power, 1 << bit) for bit in range(32))


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of A+B from the CRC-32 of A, that of B, and B's length in bytes.

    Appending n zero bytes multiplies the register by x**(8n) modulo the polynomial (Mark Adler, zlib 1.2.12).
    """
    if second_bytes == 0 or first == 0:
        return first or second
    if second_bytes != BLOCK_BYTES:
        return _product(_zeros(second_bytes), first) ^ second
    total, row = 0, 0
    matrix = _block_of_zeros()
    while first:
        if first & 1:
            total ^= matrix[row]
        first >>= 1
        row += 1
    return total ^ second


_ARRAY_BYTES = 16
"""Rows up to this are summed byte by byte, but all together: a call for each row takes as long."""


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    """What each byte does to the register."""
    register = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        register = np.where(register & 1, (register >> 1) ^ np.uint32(_POLYNOMIAL), register >> 1)
    return register.astype(np.uint32)


def crc32_rows(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """The CRC-32 of each row of a C-ordered table of bytes."""
    count, size = rows.shape
    if size > _ARRAY_BYTES:
        data = rows.reshape(-1).data
        each = (crc32(data[begin : begin + size]) for begin in range(0, count * size, size))
        return np.fromiter(each, np.uint32, count)
    register, table = np.full(count, 0xFFFFFFFF, np.uint32), _table()
    for column in rows.T:
        register = table[(register & 0xFF) ^ column] ^ (register >> 8)
    return ~register
