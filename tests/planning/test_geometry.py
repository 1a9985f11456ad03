"""Boxes, strides and intersections. Internal: pure functions that every plan and read depends on."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import PlanError
from dcp.storage.geometry import boxes as geometry
from dcp.storage.geometry.boxes import Box, BoxSet, intersecting_pairs, overlapping_pairs, range_boxes
from tests.support.examples import examples
from tests.support.sharded import Boxes
from tests.support.sharded import grid as grid_boxes


@st.composite
def shaped(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape, and boxes in it, which may be empty."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = []
    for _ in range(count):
        low = [draw(st.integers(0, n)) for n in shape]
        boxes.append(
            Box(tuple(low), tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, low, strict=True)))
        )
    return shape, boxes


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Return the positions of a box's elements in C order."""
    return np.arange(math.prod(shape)).reshape(shape)[box.slices].ravel().tolist()


@examples(200)
@given(case=shaped(2))
def test_intersection_and_difference_partition_a_box(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """The intersection and the difference contain each element of a box exactly once."""
    shape, (box, hole) = case
    common = box.intersection(hole)
    both = elements(shape, common) if common is not None else []
    assert sorted(both) == sorted({*elements(shape, box)} & {*elements(shape, hole)})
    rest = [place for part in box.without(hole) for place in elements(shape, part)]
    assert sorted(rest + both) == elements(shape, box)
    assert len([*box.without(hole)]) <= max(1, 2 * len(shape))


@examples(200)
@given(
    shape=st.lists(st.integers(1, 6), max_size=4), ends=st.tuples(st.integers(0, 1300), st.integers(0, 1300))
)
def test_a_range_of_elements_is_a_few_boxes(shape: list[int], ends: tuple[int, int]) -> None:
    """The boxes have the elements of the range in order, and are at most two for each dimension."""
    begin, end = sorted(min(at, math.prod(shape)) for at in ends)
    boxes = [*range_boxes(shape, begin, end)]
    assert [place for box in boxes for place in elements(tuple(shape), box)] == [*range(begin, end)]
    assert len(boxes) <= max(1, 2 * len(shape))


shapes = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def box_sets(draw: st.DrawFn, ndim: int, scale: int = 1) -> BoxSet:
    """Draw small boxes in a few groups, many of them equal or empty."""
    edge = st.tuples(st.integers(0, 6), st.integers(0, 4))
    rows = draw(
        st.lists(st.tuples(st.integers(0, 2), st.lists(edge, min_size=ndim, max_size=ndim)), max_size=25)
    )
    low = np.array([[begin for begin, _ in box] for _, box in rows], np.int64).reshape(len(rows), ndim)
    size = np.array([[length for _, length in box] for _, box in rows], np.int64).reshape(len(rows), ndim)
    return BoxSet(np.array([group for group, _ in rows], np.int64), low * scale, (low + size) * scale)


def meet(a: BoxSet, i: int, b: BoxSet, j: int) -> bool:
    """Return whether two boxes intersect, by definition."""
    low, high = np.maximum(a.low[i], b.low[j]), np.minimum(a.high[i], b.high[j])
    return bool(a.groups[i] == b.groups[j]) and bool((high > low).all())


@examples(200)
@given(data=st.data(), ndim=st.integers(0, 3), scale=st.sampled_from([1, 1 << 59]))
def test_intersecting_pairs_are_found_once(data: Any, ndim: int, scale: int) -> None:
    """Exactly the intersecting pairs of one group are found, in order, also near the int64 limit."""
    a, b = data.draw(box_sets(ndim, scale)), data.draw(box_sets(ndim, scale))
    if len(a.groups) and len(b.groups):
        found = [*zip(*(side.tolist() for side in intersecting_pairs(a, b)), strict=True)]
        across = itertools.product(range(len(a.groups)), range(len(b.groups)))
        assert found == [(i, j) for i, j in across if meet(a, i, b, j)]
    found = sorted(zip(*(side.tolist() for side in overlapping_pairs(a)), strict=True))
    pairs = itertools.combinations(range(len(a.groups)), 2)
    assert found == [(i, j) for i, j in pairs if meet(a, i, a, j)]


def test_many_boxes_are_fast_and_too_many_overlaps_refused() -> None:
    """Neither a grid nor boxes that are disjoint in one dimension take quadratic time. Pairs or cuts that
    would fill memory raise PlanError."""
    at = np.arange(40_000, dtype=np.int64)
    grid, sheared = np.stack([at // 200, at % 200], axis=1), np.stack([at, at], axis=1)
    for low, sizes in ((grid, [1, 1]), (sheared, [40_000, 1])):
        boxes = BoxSet(np.zeros(len(at), np.int64), low, low + np.array(sizes))
        assert len(overlapping_pairs(boxes)[0]) == 0
        assert len(intersecting_pairs(boxes, boxes)[0]) == len(at)
    same = BoxSet(np.zeros(40_000, np.int64), np.zeros((40_000, 1), np.int64), np.ones((40_000, 1), np.int64))
    with pytest.raises(PlanError, match="overlap"):
        overlapping_pairs(same)


def test_boxes_that_cross_in_too_many_ways_are_refused() -> None:
    """Strips across strips raise PlanError in seconds, instead of being cut for minutes."""
    strips = [Box((3 * number, 0), (1, 300)) for number in range(100)]
    across = [Box(box.offsets[::-1], box.sizes[::-1]) for box in strips]
    with pytest.raises(PlanError, match="overlap in too many ways"):
        geometry.disjoint(strips + across)


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes]:
    """Draw a shape, and boxes that cover it and overlap at random."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [*grid_boxes(shape, [draw(st.integers(1, n)) for n in shape])]
    for _ in range(draw(st.integers(0, 3))):
        low = [draw(st.integers(0, n - 1)) for n in shape]
        boxes.append(
            (tuple(low), tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True)))
        )
    return shape, draw(st.permutations(boxes))


@examples(120)
@given(case=overlapping())
def test_overlapping_boxes_become_disjoint_ones(case: tuple[tuple[int, ...], Boxes]) -> None:
    """Each element is in exactly one part, within the first box that has the element."""
    shape, boxes = case
    owners = np.full(shape, -1, np.int64)
    for number, box in reversed([*enumerate(boxes)]):
        owners[Box(*box).slices] = number
    times = np.zeros(shape, np.int64)
    for number, part in geometry.disjoint([Box(*box) for box in boxes]):
        assert part.intersection(Box(*boxes[number])) == part
        assert (owners[part.slices] == number).all()
        times[part.slices] += 1
    assert (times == 1).all()
