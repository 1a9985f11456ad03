"""Grouping of reads. Internal: pure rules that must hold for any ranges.

Also tests checksums of blocks that are combined from pieces.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp.storage.engine.requests import coalesce, coalesce_columns, span_bytes
from dcp.storage.engine.source import Fragment, Fragments, within_blocks
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from tests.support.examples import examples


class Range(NamedTuple):
    """A range of a file."""

    file: int
    offset: int
    size_bytes: int


@st.composite
def ranges(draw: st.DrawFn, gaps: tuple[int, ...]) -> list[Range]:
    """Draw ranges in two files, in order."""
    found = []
    for file in range(2):
        offset = 0
        for _ in range(draw(st.integers(0, 15))):
            offset = max(0, offset + draw(st.sampled_from(gaps)))
            found.append(Range(file, offset, draw(st.integers(1, 30))))
            offset += found[-1].size_bytes
    return sorted(found)


@examples(150)
@given(
    several=ranges((0, 0, 3, 8, 9, 40, -5)), limit=st.integers(1, 100), below=st.none() | st.integers(1, 30)
)
def test_groups_are_bounded_and_few(several: list[Range], limit: int, below: int | None) -> None:
    """Each range is in one group, in order, and a group ends only where the next range may not join."""
    groups = [*coalesce(several, gap_bytes=8, limit_bytes=limit, join_below_bytes=below)]
    assert [one for group in groups for one in group] == several

    def is_small(one: Range) -> bool:
        return below is None or one.size_bytes <= below

    def may_follow(before: Range, one: Range) -> bool:
        gap = one.offset - before.offset - before.size_bytes
        return before.file == one.file and 0 <= gap <= 8 and is_small(before) and is_small(one)

    for group in groups:
        assert len(group) == 1 or span_bytes(group) <= limit
        assert all(may_follow(before, one) for before, one in pairwise(group))
    for group, following in pairwise(groups):
        assert not may_follow(group[-1], following[0]) or span_bytes([*group, following[0]]) > limit


@examples(150)
@given(several=ranges((0, 0, 3, 8, 9, 40)), limit=st.integers(1, 100), below=st.integers(1, 30))
def test_columns_are_grouped_as_ranges(several: list[Range], limit: int, below: int) -> None:
    """For ranges without overlap `coalesce_columns` and `coalesce` agree."""
    files, offsets, sizes = np.array(several, np.int64).reshape(-1, 3).T
    first = coalesce_columns(files, offsets, offsets + sizes, sizes <= below, gap_bytes=8, limit_bytes=limit)
    groups = [*coalesce(several, gap_bytes=8, limit_bytes=limit, join_below_bytes=below)]
    begins = np.cumsum([0, *(len(group) for group in groups)])[:-1]
    assert first.tolist() == begins.tolist()


MEMORY = memoryview(random.Random(1).randbytes(3 * BLOCK_BYTES))


@examples(50)
@given(
    size=st.integers(1, 3 * BLOCK_BYTES),
    cuts=st.sets(st.integers(0, 3 * BLOCK_BYTES), max_size=9),
    seed=st.integers(0, 99),
)
def test_parts_in_any_order_make_every_block_once(size: int, cuts: set[int], seed: int) -> None:
    """Parts in any order, some repeated, give the checksum of every block once."""
    order = random.Random(seed)
    ends = sorted({*(cut for cut in cuts if 0 < cut < size), size})
    parts = [
        (begin + low, begin + high)
        for begin, end in pairwise([0, *ends])
        for low, high in within_blocks(end - begin, begin)
    ]
    assert all(low // BLOCK_BYTES == (high - 1) // BLOCK_BYTES for low, high in parts)
    order.shuffle(parts)
    known, found = Fragments(), dict[int, int]()
    for low, high in [*parts, *parts[: len(parts) // 2]]:
        crc = known.add(Fragment(7, low, high, crc32(MEMORY[low:high])), size)
        if crc is not None:
            found[low // BLOCK_BYTES] = crc
    blocks = range(-(-size // BLOCK_BYTES))
    assert found == {at: crc32(MEMORY[at * BLOCK_BYTES : min(size, (at + 1) * BLOCK_BYTES)]) for at in blocks}


def test_incomplete_blocks_are_listed() -> None:
    """Blocks with missing bytes are listed, also one in too many pieces, until the whole block is read."""
    known = Fragments(limit=2)
    assert known.add(Fragment(1, 0, 4, 5), 16) is None
    assert known.add(Fragment(2, 0, 1, 5), 16) is None
    assert known.add(Fragment(2, 1, 2, 5), 16) is None
    assert known.add(Fragment(2, 2, 16, 5), 16) is None
    assert known.incomplete() == [(1, 0), (2, 0)]
    assert known.add(Fragment(1, 0, 16, 9), 16) == 9
    assert known.incomplete() == [(2, 0)]
