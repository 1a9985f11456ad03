"""Neighbours that are read together: the same rule one by one and in columns."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.engine.reading.coalescing.neighbours import coalesce, coalesce_columns, span_bytes


class Range(NamedTuple):
    """A range of a file."""

    file: int
    offset: int
    size_bytes: int


@st.composite
def ranges(draw: st.DrawFn, gaps: tuple[int, ...]) -> list[Range]:
    """Ranges in the order of two files."""
    found = []
    for file in range(2):
        offset = 0
        for _ in range(draw(st.integers(0, 15))):
            offset = max(0, offset + draw(st.sampled_from(gaps)))
            found.append(Range(file, offset, draw(st.integers(1, 30))))
            offset += found[-1].size_bytes
    return sorted(found)


@settings(max_examples=150, deadline=None)
@given(
    several=ranges((0, 0, 3, 8, 9, 40, -5)), limit=st.integers(1, 100), below=st.none() | st.integers(1, 30)
)
def test_groups_are_bounded_and_as_few_as_may_be(several: list[Range], limit: int, below: int | None) -> None:
    """Every range once, in its order; and each group ends where the next range may not join it."""
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


@settings(max_examples=150, deadline=None)
@given(several=ranges((0, 0, 3, 8, 9, 40)), limit=st.integers(1, 100), below=st.integers(1, 30))
def test_columns_are_grouped_as_ranges_are(several: list[Range], limit: int, below: int) -> None:
    """Where no two share bytes."""
    files, offsets, sizes = np.array(several, np.int64).reshape(-1, 3).T
    first = coalesce_columns(files, offsets, offsets + sizes, sizes <= below, gap_bytes=8, limit_bytes=limit)
    groups = [*coalesce(several, gap_bytes=8, limit_bytes=limit, join_below_bytes=below)]
    begins = np.cumsum([0, *(len(group) for group in groups)])[:-1]
    assert first.tolist() == begins.tolist()
