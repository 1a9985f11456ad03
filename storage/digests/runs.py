"""Values that runs of bytes in a tensor add to its digest, as AES-GCM computes it.

The *value* of a run is that of GHASH over its blocks and one block of zeros: each block times a power of
`KEY` that grows with the number of blocks behind it. Blocks are counted from the tensor's first byte, so a
run that begins within one has ``phase`` zero bytes before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.digests.field import BLOCK_BYTES, Elements, as_elements, product, times

__all__ = ["KEY", "row_values", "run_value"]

KEY: Final = 0x66E94BD4EF8A2C3B884CFA59CA342B2E
"""AES-128 of zeros with the key of zeros, which GHASH goes by. It generates the whole group of the field, so
that no two positions have the same power."""

_NONCE: Final = bytes(12)
_MAX_CALL_BYTES: Final = 1 << 30  # AES-GCM takes less than 2 GiB at a time
_TABLE_BLOCKS: Final = 3
"""Rows of up to so many blocks are multiplied by tables, all together: a call for each takes as long."""


def run_value(data: memoryview, phase: int = 0) -> int:
    """The value of one run."""
    if phase:
        data = memoryview(bytes(phase) + bytes(data))
    if len(data) > _MAX_CALL_BYTES:
        raise ValueError(f"{len(data)} bytes at once, and the limit is {_MAX_CALL_BYTES}")
    return int.from_bytes(_ghash()(data), "big") ^ _correction(len(data))


def row_values(rows: npt.NDArray[np.uint8], phase: int = 0) -> Elements:
    """The values of many runs of one length, a row each, all of one ``phase``."""
    count, size = rows.shape
    blocks = -(-(phase + size) // BLOCK_BYTES)
    if phase or (blocks <= _TABLE_BLOCKS and size % BLOCK_BYTES):
        padded = np.zeros((count, blocks * BLOCK_BYTES), np.uint8)
        padded[:, phase : phase + size] = rows
        rows, size = padded, blocks * BLOCK_BYTES
    if blocks > _TABLE_BLOCKS:
        data = np.ascontiguousarray(rows).reshape(-1).data
        tags = b"".join(map(_ghash(), (data[begin : begin + size] for begin in range(0, count * size, size))))
        return as_elements(tags) ^ as_elements(_correction(size).to_bytes(BLOCK_BYTES, "big"))
    elements = as_elements(np.ascontiguousarray(rows).reshape(-1)).reshape(count, blocks, 2)
    total = np.zeros((count, 2), np.uint64)
    for column in range(blocks):
        total = times(total ^ elements[:, column], KEY)
    return times(total, KEY)


@lru_cache(maxsize=1)
def _ghash() -> Callable[[Any], bytes]:
    """Bytes to what AES-GCM authenticates them by: their value but for `_correction`."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # dear to import, and seldom needed

    return partial(AESGCM(bytes(BLOCK_BYTES)).encrypt, _NONCE, b"")


@lru_cache(maxsize=1024)
def _correction(size: int) -> int:
    """The part of the tag beside the value: the encrypted counter, and the length in bits as a block."""
    return _ENCRYPTED_COUNTER ^ product(8 * size << 64, KEY)


_ENCRYPTED_COUNTER: Final = 0x58E2FCCEFA7E3061367F1D57A4E7455A
"""The tag of no bytes at all."""
