"""Checksums of blocks out of those of their parts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.engine.reading import fragments as module
from dcp.storage.engine.reading.fragments import Fragment, Fragments, within_blocks
from dcp.storage.formats.checksums import crc32

_BLOCK = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few bytes."""
    monkeypatch.setattr(module, "BLOCK_BYTES", _BLOCK)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 60), cuts=st.sets(st.integers(0, 60)), seed=st.integers(0, 99))
def test_parts_in_any_order_make_every_block_once(size: int, cuts: set[int], seed: int) -> None:
    """Whatever the parts are, and however often they come."""
    data, order = random.Random(seed).randbytes(size), random.Random(seed)
    ends = sorted({*(cut for cut in cuts if cut < size), size})
    parts = []
    begin = 0
    for end in ends:
        parts += [(begin + low, begin + high) for low, high in within_blocks(end - begin, begin)]
        begin = end
    partial = [(low, high) for low, high in parts if high - low < min(_BLOCK, size - low // _BLOCK * _BLOCK)]
    order.shuffle(parts)
    known, found = Fragments(), []
    for low, high in [*parts, *partial]:
        crc = known.add(Fragment(7, low, high, crc32(data[low:high])), size)
        if crc is not None:
            found.append((low // _BLOCK, crc))
    expected = [(at, crc32(data[at * _BLOCK : (at + 1) * _BLOCK])) for at in range(-(-size // _BLOCK))]
    assert sorted(found) == expected
    assert known.incomplete() == []


def test_a_block_that_lacks_bytes_is_told_until_it_is_whole() -> None:
    """Also one that is read again as a whole, and one that came in too many pieces."""
    known = Fragments(limit=2)
    assert known.add(Fragment(1, 0, 4, 5), 16) is None
    assert known.add(Fragment(2, 0, 1, 5), 16) is None
    assert known.add(Fragment(2, 1, 2, 5), 16) is None
    assert known.add(Fragment(2, 2, 16, 5), 16) is None
    assert known.incomplete() == [(1, 0), (2, 0)]
    assert known.add(Fragment(1, 0, 16, 9), 16) == 9
    assert known.incomplete() == [(2, 0)]
    known.clear()
    assert known.incomplete() == []


@given(size=st.integers(0, 100), first=st.integers(0, 50), second=st.integers(0, 50))
def test_parts_lie_in_one_block_of_each_payload(size: int, first: int, second: int) -> None:
    """And follow one another."""
    position = 0
    for begin, end in within_blocks(size, first, second):
        assert begin == position < end
        assert (first + begin) // _BLOCK == (first + end - 1) // _BLOCK
        assert (second + begin) // _BLOCK == (second + end - 1) // _BLOCK
        position = end
    assert position == size
