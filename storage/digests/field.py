"""The field with 2**128 elements as AES-GCM has it (NIST SP 800-38D, 6.3), in Python's ints and in numpy.

A block of 16 bytes is an element: the highest bit of its first byte is the coefficient of 1, the lowest of
its last byte that of x**127. An int has the block's bytes in big-endian order; an array of elements has two
uint64 (the block's bytes as they are) in its last dimension.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from dcp.storage.geometry.ragged import Int64

__all__ = [
    "BLOCK_BYTES",
    "Elements",
    "as_elements",
    "as_int",
    "horner",
    "power",
    "product",
    "scaled",
    "times",
    "times_powers",
]

BLOCK_BYTES: Final = 16
ONE: Final = 1 << 127
_REDUCTION: Final = 0xE1 << 120
"""x**128 = x**7 + x**2 + x + 1."""

Elements = npt.NDArray[np.uint64]

_FEW = 3
"""Up to so many elements Python's ints are faster than calls of numpy."""


def product(a: int, b: int) -> int:
    """Return the product of two elements."""
    total = 0
    while a:
        if a & ONE:
            total ^= b
        a = (a << 1) & ((1 << 128) - 1)
        b = (b >> 1) ^ _REDUCTION if b & 1 else b >> 1
    return total


@lru_cache(maxsize=8)
def _lists(factor: int) -> list[list[int]]:
    """`_table` as Python's ints: half a millisecond to make, a tenth of `product` to use."""
    rows = _table(factor).view(np.uint8).reshape(BLOCK_BYTES, 256, BLOCK_BYTES)
    return [[int.from_bytes(one.tobytes(), "big") for one in row] for row in rows]


def scaled(value: int, factor: int) -> int:
    """`product` for few factors that come again and again."""
    total = 0
    for row, byte in zip(_lists(factor), value.to_bytes(BLOCK_BYTES, "big"), strict=True):
        total ^= row[byte]
    return total


@lru_cache(maxsize=4096)
def power(base: int, exponent: int) -> int:
    """Return ``base`` to a power of 0 and above."""
    result = ONE
    for bit in range(exponent.bit_length()):
        if exponent >> bit & 1:
            result = product(_square(base, bit), result)
    return result


@lru_cache(maxsize=256)
def _square(base: int, times: int) -> int:
    """Return ``base`` to the power of ``2**times``."""
    if times == 0:
        return base
    root = _square(base, times - 1)
    return product(root, root)


def as_elements(blocks: bytes | memoryview | npt.NDArray[np.uint8]) -> Elements:
    """Return whole blocks of bytes, one after the other, as (n, 2)."""
    return np.frombuffer(blocks, np.uint64).reshape(-1, 2)


def as_int(element: Elements) -> int:
    """Return one element."""
    return int.from_bytes(element.tobytes(), "big")


@lru_cache(maxsize=128)
def _table(factor: int) -> Elements:
    """Return the products of ``factor`` with each value of each byte of a block: (16, 256, 2)."""
    basis, value = [], factor
    for _ in range(128):
        basis.append(value.to_bytes(BLOCK_BYTES, "big"))
        value = (value >> 1) ^ _REDUCTION if value & 1 else value >> 1
    by_bit = np.frombuffer(b"".join(basis), np.uint64).reshape(BLOCK_BYTES, 8, 2)
    table = np.zeros((BLOCK_BYTES, 256, 2), np.uint64)
    for bit in range(8):
        table[:, 1 << bit : 2 << bit] = table[:, : 1 << bit] ^ by_bit[:, 7 - bit, None]
    return table


def times(elements: Elements, factor: int) -> Elements:
    """Return all ``elements`` (..., 2) times one."""
    if elements.size <= 2 * _FEW:
        made = [product(factor, as_int(one)).to_bytes(BLOCK_BYTES, "big") for one in elements.reshape(-1, 2)]
        return as_elements(b"".join(made)).reshape(elements.shape)
    table = _table(factor)
    places = np.ascontiguousarray(elements).view(np.uint8).reshape(*elements.shape[:-1], BLOCK_BYTES)
    total: Elements = table[0][places[..., 0]]
    for column in range(1, BLOCK_BYTES):
        total ^= table[column][places[..., column]]
    return total


def horner(elements: Elements, factor: int) -> Elements:
    """Return ``((e[0] * factor + e[1]) * factor + e[2]) ...`` along the last dimension but one, by halves."""
    while (count := elements.shape[-2]) > 1:
        if count % 2:  # zeros before the first add nothing
            empty = np.zeros((*elements.shape[:-2], 1, 2), np.uint64)
            elements = np.concatenate([empty, elements], axis=-2)
        elements = times(elements[..., ::2, :], factor) ^ elements[..., 1::2, :]
        factor = product(factor, factor)
    if count == 0:
        return np.zeros((*elements.shape[:-2], 2), np.uint64)
    return elements[..., 0, :]


def times_powers(elements: Elements, base: int, exponents: Int64) -> Elements:
    """Return each of ``elements`` (n, 2) times ``base`` to a power of its own."""
    result = elements.copy()
    bit = 0
    while (left := exponents >> bit).any():
        rows = np.flatnonzero(left & 1)
        if len(rows):
            result[rows] = times(result[rows], _square(base, bit))
        bit += 1
    return result
