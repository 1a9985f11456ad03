"""Digests are what docs/format.md says: in another implementation, written from it, and in any parts."""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.digests.boxes import BoxDigest, blocks_of, logical_runs
from dcp.storage.digests.field import ONE, as_elements, horner, power, product, times, times_powers
from dcp.storage.digests.runs import KEY, row_values, run_value
from dcp.storage.digests.shown import shown_digest

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


@settings(max_examples=150, deadline=None)
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


@pytest.mark.parametrize("columns", [300_003, 262_144, 5, 1])
def test_long_and_short_runs_add_up(columns: int) -> None:
    """Rows cut within blocks, on blocks, of a few bytes, and longer than what is taken at a time."""
    array = random_array((3, 2, 1_300_001), 1, columns)
    left = added(array, [0, 0, 0], [3, 2, columns], [400_000])
    right = added(array, [0, 0, columns], [3, 2, 1_300_001 - columns], [10_000_000])
    assert left ^ right == run_value(memoryview(array.tobytes()))


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


@pytest.mark.parametrize("distance", [1, 16, 4096, 1 << 20])
def test_flipped_bits_and_swapped_blocks_are_seen(distance: int) -> None:
    """One bit anywhere, two blocks changed for each other, a row moved on by one."""
    data = bytearray(random_array((3 << 20,), 1, distance).tobytes())
    before = run_value(memoryview(data))
    for bit in (0, 7, 8 * distance + 3, 8 * len(data) - 1):
        data[bit // 8] ^= 1 << bit % 8
        assert run_value(memoryview(data)) != before
        data[bit // 8] ^= 1 << bit % 8
    data[:distance], data[distance : 2 * distance] = data[distance : 2 * distance], data[:distance]
    assert run_value(memoryview(data)) != before
    assert run_value(memoryview(data[-1:] + data[:-1])) != before


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
