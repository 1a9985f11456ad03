"""Digests and checksums. Internal: pure; compared with docs/format.md's own definition and with zlib."""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.storage.digests.boxes import BoxDigest, blocks_of, logical_runs
from dcp.storage.digests.field import ONE, as_elements, horner, power, product, times, times_powers
from dcp.storage.digests.runs import KEY, row_values
from dcp.storage.digests.shown import shown_digest
from dcp.storage.formats.checksums import BLOCK_BYTES as CRC_BLOCK_BYTES
from dcp.storage.formats.checksums import crc32, crc32_combine, crc32_rows
from tests.support.examples import examples

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
H = 0x66E94BD4EF8A2C3B884CFA59CA342B2E


def multiplied(x: int, y: int) -> int:
    """X * Y by algorithm 1 of NIST SP 800-38D."""
    z, v = 0, y
    for bit in range(127, -1, -1):
        if x >> bit & 1:
            z ^= v
        v = v >> 1 ^ (0xE1 << 120 if v & 1 else 0)
    return z


def sum_of(data: bytes) -> int:
    """The sum of a tensor's bytes, by section 10 of the document alone."""
    total = 0
    for begin in range(0, len(data), 16):
        total = multiplied(total ^ int.from_bytes(data[begin : begin + 16].ljust(16, b"\0"), "big"), H)
    return multiplied(total, H)


def added(array: np.ndarray[Any, Any], offsets: list[int], sizes: list[int], cuts: list[int]) -> int:
    """What a box of ``array`` adds, given in pieces of lengths ``cuts``, which repeat."""
    place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    data, position = np.ascontiguousarray(array[place]).tobytes(), 0
    where = logical_runs(array.shape, tuple(offsets), tuple(sizes), array.itemsize)
    box, lengths = BoxDigest(where), itertools.cycle(cuts)
    while position < len(data):
        length = next(lengths)
        box.update(memoryview(data[position : position + length]))
        position += length
    return product(power(KEY, where.blocks_behind), box.value())


def random_array(shape: tuple[int, ...], itemsize: int, seed: int) -> np.ndarray[Any, Any]:
    """Any bytes."""
    data = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    return data.view({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[itemsize]).reshape(shape)


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[list[int]], list[int]]:
    """An array, edges to cut it at in each dimension, and lengths of pieces."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    array = random_array(shape, draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.integers(0, 99)))
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    return array, edges, draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))


@examples(150)
@given(cut_arrays())
def test_the_parts_of_any_cutting_add_up_to_the_whole(
    drawn: tuple[np.ndarray[Any, Any], list[list[int]], list[int]],
) -> None:
    """A grid of boxes in any number of dimensions, given piece by piece, has the sum of the document."""
    array, edges, cuts = drawn
    total = 0
    for spans in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
        total ^= added(array, [low for low, _ in spans], [high - low for low, high in spans], cuts)
    assert total == sum_of(array.tobytes())


def test_tables_and_calls_of_the_cipher_agree_with_the_document() -> None:
    """Rows of any length and phase, many at once."""
    for size, phase in itertools.product((0, 1, 15, 16, 33, 96, 112, 1000), (0, 7)):
        rows = random_array((5, size), 1, size)
        expected = [sum_of(bytes(phase) + row.tobytes()) for row in rows]
        assert [int.from_bytes(one.tobytes(), "big") for one in row_values(rows, phase)] == expected


def test_the_field_is_that_of_gcm() -> None:
    """Products, powers, Horner's rule and the vectorised forms agree; the key generates the whole group."""
    elements = random_array((37, 2), 8, 1)
    numbers = [int.from_bytes(one.tobytes(), "big") for one in elements]
    assert [int.from_bytes(one.tobytes(), "big") for one in times(elements, H)] == [
        multiplied(number, H) for number in numbers
    ]
    total = 0
    for number in numbers:
        total = multiplied(total, H) ^ number
    assert int.from_bytes(horner(elements, H).tobytes(), "big") == total
    exponents = np.arange(37, dtype=np.int64) * 1_000_003
    assert [int.from_bytes(one.tobytes(), "big") for one in times_powers(elements, H, exponents)] == [
        multiplied(number, power(H, exponent))
        for number, exponent in zip(numbers, exponents.tolist(), strict=True)
    ]
    order = 2**128 - 1
    primes = (3, 5, 17, 257, 641, 65537, 274177, 6700417, 67280421310721)
    assert math.prod(primes) == order and power(KEY, order) == ONE == 1 << 127
    assert all(power(H, order // prime) != ONE for prime in primes)
    assert as_elements(bytes(32)).shape == (2, 2) and blocks_of(17) == 2


def test_the_digest_tells_dtype_and_shape() -> None:
    """Equal bytes as another dtype or in another shape; and the example of the document."""
    total = sum_of(bytes.fromhex("0000803f0040404080 40a040")).to_bytes(16, "big")
    shown = {
        shown_digest(total, dtype, shape)
        for dtype, shape in (
            ("bfloat16", (2, 3)),
            ("float16", (2, 3)),
            ("bfloat16", (3, 2)),
            ("bfloat16", (6,)),
        )
    }
    assert len(shown) == 4
    by_document = hashlib.blake2b(
        b"dcphub tensor digest 1\nbfloat16\n2,3\n" + total, digest_size=16
    ).hexdigest()
    assert by_document == shown_digest(total, "bfloat16", (2, 3)) in shown
    text = DOCUMENT.read_text()
    assert total.hex() in text and by_document in text
    assert shown_digest(bytes(16), "float32", ()) in text


@given(
    first=st.binary(max_size=64),
    second=st.binary(max_size=64) | st.just(b"\x9d\x0a\xd9\x6d"),
    zeros=st.sampled_from([0, 1, 4096, CRC_BLOCK_BYTES - 4, CRC_BLOCK_BYTES, CRC_BLOCK_BYTES + 1]),
)
def test_the_checksum_of_two_pieces_is_that_of_both_together(first: bytes, second: bytes, zeros: int) -> None:
    """Whatever their lengths; also where one of the two is that of no bytes, which is 0."""
    whole = second + bytes(zeros)
    assert crc32_combine(crc32(first), crc32(whole), len(whole)) == zlib.crc32(first + whole)


@pytest.mark.parametrize("size", [0, 1, 4, 16, 17, 100])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_the_checksums_of_rows_are_those_of_each(count: int, size: int) -> None:
    """Short rows are summed together, longer ones one by one."""
    rows = np.random.default_rng(size).integers(0, 256, (count, size), np.uint8)
    assert crc32_rows(rows).tolist() == [zlib.crc32(row) for row in rows]
