"""Which boxes meet, against the obvious loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.errors import PlanError
from dcp.storage.geometry import joins
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.joins import BoxSet, disjoint, intersecting_pairs, overlapping_pairs
from tests.support.sharded import Boxes
from tests.support.sharded import grid as grid_boxes


@st.composite
def box_sets(draw: st.DrawFn, ndim: int, scale: int = 1) -> BoxSet:
    """Small boxes, many of them alike or empty, in a few groups."""
    edge = st.tuples(st.integers(0, 6), st.integers(0, 4))
    rows = draw(
        st.lists(st.tuples(st.integers(0, 2), st.lists(edge, min_size=ndim, max_size=ndim)), max_size=25)
    )
    low = np.array([[begin for begin, _ in box] for _, box in rows], np.int64).reshape(len(rows), ndim)
    size = np.array([[length for _, length in box] for _, box in rows], np.int64).reshape(len(rows), ndim)
    return BoxSet(np.array([group for group, _ in rows], np.int64), low * scale, (low + size) * scale)


def meet(a: BoxSet, i: int, b: BoxSet, j: int) -> bool:
    """The definition."""
    low, high = np.maximum(a.low[i], b.low[j]), np.minimum(a.high[i], b.high[j])
    return bool(a.groups[i] == b.groups[j]) and bool((high > low).all())


@settings(deadline=None, max_examples=200)
@given(data=st.data(), ndim=st.integers(0, 3), scale=st.sampled_from([1, 1 << 59]))
def test_intersections_are_all_and_only_those_that_share_volume(
    data: st.DataObject, ndim: int, scale: int
) -> None:
    """Every pair of one group with common volume, once, in order; also with coordinates near the int64
    limit."""
    a, b = data.draw(box_sets(ndim, scale)), data.draw(box_sets(ndim, scale))
    if not len(a.groups) or not len(b.groups):
        return
    found = list(zip(*(side.tolist() for side in intersecting_pairs(a, b)), strict=True))
    pairs = itertools.product(range(len(a.groups)), range(len(b.groups)))
    assert found == [(i, j) for i, j in pairs if meet(a, i, b, j)]


@settings(deadline=None, max_examples=200)
@given(data=st.data(), ndim=st.integers(0, 3))
def test_overlaps_are_all_found_once(data: st.DataObject, ndim: int) -> None:
    """Every pair i < j of one group with common volume, once."""
    boxes = data.draw(box_sets(ndim))
    found = sorted(zip(*(side.tolist() for side in overlapping_pairs(boxes)), strict=True))
    pairs = itertools.combinations(range(len(boxes.groups)), 2)
    assert found == [(i, j) for i, j in pairs if meet(boxes, i, boxes, j)]


def grid(rows: int, columns: int) -> BoxSet:
    """A tensor cut into a grid of unit boxes."""
    low = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 2)
    return BoxSet(np.zeros(rows * columns, np.int64), low, low + 1)


def test_a_grid_costs_its_boxes_not_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 boxes in a grid are joined within a bound of pairs that a row-by-row join would break."""
    monkeypatch.setattr(joins, "MAX_PAIRS", 100_000)
    boxes = grid(200, 200)
    assert len(overlapping_pairs(boxes)[0]) == 0
    i, j = intersecting_pairs(boxes, boxes)
    assert np.array_equal(i, np.arange(40_000))
    assert np.array_equal(i, j)


def test_the_selective_dimension_is_joined_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that all overlap in the first dimension but are apart in the second cost no square either."""
    monkeypatch.setattr(joins, "MAX_PAIRS", 100_000)
    at = np.arange(10_000, dtype=np.int64)
    low = np.stack([at, at], axis=1)
    sheared = BoxSet(np.zeros(10_000, np.int64), low, low + np.array([10_000, 1]))
    assert len(intersecting_pairs(sheared, sheared)[0]) == 10_000


def test_absurdly_many_overlaps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that all lie on each other raise instead of filling memory with pairs."""
    monkeypatch.setattr(joins, "MAX_PAIRS", 1000)
    same = BoxSet(np.zeros(100, np.int64), np.zeros((100, 1), np.int64), np.ones((100, 1), np.int64))
    with pytest.raises(PlanError, match="overlap"):
        overlapping_pairs(same)


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes]:
    """A shape, and boxes that cover it and lie over each other as they like."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [*grid_boxes(shape, [draw(st.integers(1, n)) for n in shape])]
    for _ in range(draw(st.integers(0, 3))):
        low = [draw(st.integers(0, n - 1)) for n in shape]
        boxes.append(
            (tuple(low), tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True)))
        )
    return shape, draw(st.permutations(boxes))


@settings(max_examples=120, deadline=None)
@given(case=overlapping())
def test_overlapping_boxes_become_disjoint_ones(case: tuple[tuple[int, ...], Boxes]) -> None:
    """Each element is in one part only, which lies within its box, the first one that has the element."""
    shape, boxes = case
    owners = np.full(shape, -1, np.int64)
    for number, box in reversed([*enumerate(boxes)]):
        owners[Box(*box).slices] = number
    times = np.zeros(shape, np.int64)
    for number, part in disjoint([Box(*box) for box in boxes]):
        assert part.intersection(Box(*boxes[number])) == part
        assert (owners[part.slices] == number).all()
        times[part.slices] += 1
    assert (times == 1).all()


def test_disjoint_parts_of_odd_boxes() -> None:
    """An empty box has no part; one without dimensions is a part of one element; of equal ones the first
    counts."""
    assert disjoint([Box((0, 0), (0, 3))]) == []
    assert disjoint([Box((), ())]) == [(0, Box((), ()))]
    assert disjoint([Box((0,), (0,)), Box((2,), (2,)), Box((2,), (2,))]) == [(1, Box((2,), (2,)))]
    assert disjoint([]) == []


def test_absurdly_many_cuts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on what overlapping boxes may be cut into."""
    monkeypatch.setattr(joins, "MAX_CUTS", 3)
    with pytest.raises(PlanError, match="too many ways"):
        disjoint([Box((at, at), (5, 5)) for at in range(4)])
