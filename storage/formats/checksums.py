"""CRC-32 (polynomial of zip and zlib), in hardware.

The same checksum serves zip entries, which stock torch checks, and blocks of the manifest: `crc32_combine`
joins CRCs of adjacent blocks without reading the bytes.
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
