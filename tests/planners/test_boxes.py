"""Box arithmetic against the obvious loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.planners.layout import boxes as boxes_module
from dcp.planners.layout.boxes import (
    BoxSet,
    by_ndim,
    expand_ranges,
    gather_rows,
    intersecting_pairs,
    overlapping_pairs,
    row_products,
)
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import starts


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
    monkeypatch.setattr(boxes_module, "MAX_PAIRS", 100_000)
    boxes = grid(200, 200)
    assert len(overlapping_pairs(boxes)[0]) == 0
    i, j = intersecting_pairs(boxes, boxes)
    assert np.array_equal(i, np.arange(40_000))
    assert np.array_equal(i, j)


def test_the_selective_dimension_is_joined_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that all overlap in the first dimension but are apart in the second cost no square either."""
    monkeypatch.setattr(boxes_module, "MAX_PAIRS", 100_000)
    at = np.arange(10_000, dtype=np.int64)
    low = np.stack([at, at], axis=1)
    sheared = BoxSet(np.zeros(10_000, np.int64), low, low + np.array([10_000, 1]))
    assert len(intersecting_pairs(sheared, sheared)[0]) == 10_000


def test_absurdly_many_overlaps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that all lie on each other raise instead of filling memory with pairs."""
    monkeypatch.setattr(boxes_module, "MAX_PAIRS", 1000)
    same = BoxSet(np.zeros(100, np.int64), np.zeros((100, 1), np.int64), np.ones((100, 1), np.int64))
    with pytest.raises(PlanError, match="overlap"):
        overlapping_pairs(same)


def test_ragged_rows() -> None:
    """Ranges, gathered rows and products of ragged columns, with empty rows among them."""
    start, values = starts([2, 0, 3, 0]), np.array([2, 3, 4, 5, 6], np.int64)
    assert expand_ranges(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert gather_rows(values, start, np.array([2, 1, 0])).tolist() == [4, 5, 6, 2, 3]
    assert row_products(values, start).tolist() == [6, 1, 120, 1]
    groups = {
        group.offsets.shape[1]: group.rows.tolist() for group in by_ndim(np.arange(4), start, values, values)
    }
    assert groups == {0: [1, 3], 2: [0], 3: [2]}
