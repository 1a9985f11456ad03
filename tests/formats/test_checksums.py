import random
import zlib

import numpy as np
import pytest

from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_combine, crc32_rows


@pytest.mark.parametrize("second_bytes", [0, 1, 2, 63, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_the_checksum_of_two_pieces_is_that_of_both_together(second_bytes: int) -> None:
    """Whatever their lengths, and also for a first piece of nothing."""
    generator = random.Random(second_bytes)
    first, second = generator.randbytes(1000), generator.randbytes(second_bytes)
    assert crc32_combine(crc32(first), crc32(second), second_bytes) == zlib.crc32(first + second)
    assert crc32_combine(0, crc32(second), second_bytes) == zlib.crc32(second)


@pytest.mark.parametrize("size", [0, 1, 4, 16, 17, 100])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_the_checksums_of_rows_are_those_of_each(count: int, size: int) -> None:
    """Short rows are summed together, longer ones one by one."""
    rows = np.random.default_rng(size).integers(0, 256, (count, size), np.uint8)
    assert crc32_rows(rows).tolist() == [zlib.crc32(row) for row in rows]
