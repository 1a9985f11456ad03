"""CRC-32 (the polynomial of zip and zlib), by hardware.

One checksum serves the zip entry that stock torch checks and the blocks of the manifest: `crc32_combine`
turns the CRCs of adjacent blocks into the CRC of the whole without touching the bytes again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32, crc32_combine

from dcp.storage.geometry.strides import BLOCK_BYTES

__all__ = ["BLOCK_BYTES", "crc32", "crc32_combine", "crc32_rows"]


def crc32_rows(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each row of a C-ordered table of bytes."""
    count, size = rows.shape
    data = rows.reshape(-1).data
    begins = range(0, count * size, size) if size else [0] * count
    return np.fromiter((crc32(data[begin : begin + size]) for begin in begins), np.uint32, count)
