"""Boxes, strides and which boxes meet. Internal: pure functions on which every plan and every read rests."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import PlanError
from dcp.storage.geometry.boxes import Box, contiguous_position, range_boxes, split_box
from dcp.storage.geometry.joins import BoxSet, disjoint, intersecting_pairs, overlapping_pairs
from dcp.storage.geometry.payload_parts import box_parts, is_sparse
from dcp.storage.geometry.strides import (
    c_strides,
    c_strides_by_row,
    contiguous_positions,
    dense_order,
    extent,
    is_c_ordered,
    ragged_c_strides,
)
from tests.support.examples import examples
from tests.support.sharded import Boxes
from tests.support.sharded import grid as grid_boxes


@st.composite
def shaped(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes of it, which may be empty."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = []
    for _ in range(count):
        low = [draw(st.integers(0, n)) for n in shape]
        boxes.append(
            Box(tuple(low), tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, low, strict=True)))
        )
    return shape, boxes


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """The C-order positions of a box's elements."""
    return np.arange(math.prod(shape)).reshape(shape)[box.slices].ravel().tolist()


@examples(200)
@given(case=shaped(2))
def test_intersection_and_subtraction_share_the_elements_out(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """What both have, and what one has without the other, are all of the one, each once."""
    shape, (box, hole) = case
    common = box.intersection(hole)
    both = elements(shape, common) if common is not None else []
    assert sorted(both) == sorted({*elements(shape, box)} & {*elements(shape, hole)})
    rest = [place for part in box.without(hole) for place in elements(shape, part)]
    assert sorted(rest + both) == elements(shape, box)
    assert len([*box.without(hole)]) <= max(1, 2 * len(shape))


@examples(200)
@given(case=shaped(1), by=st.lists(st.integers(-5, 5), min_size=3, max_size=3))
def test_a_box_is_the_same_from_anywhere(case: tuple[tuple[int, ...], list[Box]], by: list[int]) -> None:
    """Moves and turns have inverses; it is contiguous where its elements follow one another."""
    shape, (box,) = case
    assert (
        box.moved(by[: len(shape)]).seen_from(by[: len(shape)]) == box == Box.between(box.offsets, box.high)
    )
    turn = np.random.default_rng(len(by)).permutation(len(shape)).tolist()
    assert box.permuted(turn).permuted(np.argsort(turn).tolist()) == box
    assert Box.whole(shape).intersection(box) == (box if box.volume else None)
    if places := elements(shape, box):
        is_run = places == [*range(places[0], places[0] + len(places))]
        assert contiguous_position(shape, box) == (places[0] if is_run else None)


@examples(100)
@given(lengths=st.lists(st.integers(0, 6), max_size=4), limit=st.integers(1, 40))
def test_split_boxes_are_runs_in_order(lengths: list[int], limit: int) -> None:
    """Parts of a box are contiguous, of at most the limit, and one after the other all of it."""
    box = Box.whole(lengths)
    position = 0
    for part in split_box(box, limit):
        assert part.volume <= limit
        assert contiguous_position(tuple(lengths), part) == position
        position += part.volume
    assert position == math.prod(lengths)


@examples(200)
@given(
    shape=st.lists(st.integers(1, 6), max_size=4), ends=st.tuples(st.integers(0, 1300), st.integers(0, 1300))
)
def test_a_range_of_elements_is_a_few_boxes(shape: list[int], ends: tuple[int, int]) -> None:
    """They have its elements in their order, and are at most two a dimension."""
    begin, end = sorted(min(at, math.prod(shape)) for at in ends)
    boxes = [*range_boxes(shape, begin, end)]
    assert [place for box in boxes for place in elements(tuple(shape), box)] == [*range(begin, end)]
    assert len(boxes) <= max(1, 2 * len(shape))


shapes = st.lists(st.integers(1, 5), max_size=4)


@given(shape=shapes, steps=st.lists(st.integers(2, 3), min_size=4, max_size=4), data=st.data())
def test_only_permuted_arrays_are_dense(shape: list[int], steps: list[int], data: st.DataObject) -> None:
    """In the order they were permuted from; not every step-th element, nor one that stands for several."""
    array = np.empty(shape, np.uint8).transpose(data.draw(st.permutations(range(len(shape)))))
    order = dense_order(array.shape, array.strides)
    assert order is not None and array.transpose(order).flags.c_contiguous
    assert is_c_ordered(array.shape, array.strides) == array.flags.c_contiguous
    assert extent(array.shape, array.strides) == array.size
    whole = np.empty([n * step for n, step in zip(shape, steps, strict=False)], np.uint8)
    array = whole[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    assert array.size <= 1 or dense_order(array.shape, array.strides) is None
    assert extent(array.shape, array.strides, 1) <= whole.size
    repeated = np.broadcast_to(np.empty(shape, np.uint8), (2, *shape))
    assert dense_order(repeated.shape, repeated.strides) is None


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), itemsize=st.sampled_from([1, 2, 8]))
def test_c_strides_are_those_of_numpy(shape: list[int], itemsize: int) -> None:
    """An empty dimension counts as one of one element; many rows at once are the same."""
    steps = c_strides(shape, itemsize)
    assert steps == np.empty([max(n, 1) for n in shape], f"V{itemsize}").strides
    rows = c_strides_by_row(np.array([shape, shape], np.int64), np.array([itemsize, 1], np.int64))
    assert [tuple(row) for row in rows.tolist()] == [steps, c_strides(shape)]
    ragged = np.array([7, *shape, *shape], np.int64), np.array([0, 1, 1, 1 + len(shape), 1 + 2 * len(shape)])
    found = ragged_c_strides(*ragged, np.array([4, 1, itemsize, 1], np.int64))
    assert found.tolist() == [4, *steps, *c_strides(shape)]
    assert extent(shape, steps, itemsize) == np.empty(shape, f"V{itemsize}").nbytes
    assert is_c_ordered(shape, c_strides(shape))


@examples(200)
@given(data=st.data(), ndim=st.integers(0, 3))
def test_many_boxes_are_contiguous_where_each_of_them_is(data: st.DataObject, ndim: int) -> None:
    """The arrays agree with the loop, and call nothing contiguous that is empty or reaches outside."""
    edge = st.tuples(st.integers(1, 4), st.integers(-1, 4), st.integers(0, 5))
    rows = data.draw(st.lists(st.lists(edge, min_size=ndim, max_size=ndim), min_size=1, max_size=20))
    sizes, offsets, lengths = np.array(rows, np.int64).reshape(len(rows), ndim, 3).transpose(2, 0, 1)
    found = contiguous_positions(sizes, offsets, lengths)
    for row, (is_run, first) in enumerate(zip(*(column.tolist() for column in found), strict=True)):
        shape, box = (
            tuple(sizes[row].tolist()),
            Box(tuple(offsets[row].tolist()), tuple(lengths[row].tolist())),
        )
        is_inside = box.volume > 0 and Box.whole(shape).intersection(box) == box
        position = contiguous_position(shape, box) if is_inside else None
        assert is_run == (position is not None)
        assert position in (None, first)


@examples(200)
@given(
    shape=shapes,
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    limit=st.integers(2, 200),
    gap=st.integers(0, 20),
)
def test_parts_of_a_strided_box_have_each_element_once(
    shape: list[int], steps: list[int], limit: int, gap: int
) -> None:
    """In bounded stretches of the payload, none of which reads over a gap that is too wide."""
    whole = np.arange(int(np.prod([n * s for n, s in zip(shape, steps, strict=False)])), dtype=np.int64)
    whole = whole.reshape([n * step for n, step in zip(shape, steps, strict=False)])
    array = whole[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    strides = tuple(stride // 8 * 2 for stride in array.strides)  # of elements of two bytes
    times = np.zeros(shape, np.int64)
    for part in box_parts(0, tuple(shape), strides, 2, limit_bytes=limit, gap_bytes=gap):
        box = Box(part.offsets, part.lengths)
        times[box.slices] += 1
        assert array[box.slices].min() * 2 == part.begin
        assert array[box.slices].max() * 2 + 2 == part.end
        assert part.end - part.begin <= limit
        assert not is_sparse(part.lengths, strides, 2, gap)
    assert (times == 1).all()


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


@examples(200)
@given(data=st.data(), ndim=st.integers(0, 3), scale=st.sampled_from([1, 1 << 59]))
def test_pairs_of_boxes_that_share_volume_are_found_once(data: Any, ndim: int, scale: int) -> None:
    """All and only those of one group, in order; also with coordinates near the int64 limit."""
    a, b = data.draw(box_sets(ndim, scale)), data.draw(box_sets(ndim, scale))
    if len(a.groups) and len(b.groups):
        found = [*zip(*(side.tolist() for side in intersecting_pairs(a, b)), strict=True)]
        across = itertools.product(range(len(a.groups)), range(len(b.groups)))
        assert found == [(i, j) for i, j in across if meet(a, i, b, j)]
    found = sorted(zip(*(side.tolist() for side in overlapping_pairs(a)), strict=True))
    pairs = itertools.combinations(range(len(a.groups)), 2)
    assert found == [(i, j) for i, j in pairs if meet(a, i, a, j)]


def test_many_boxes_cost_what_they_share_and_absurdly_many_overlaps_are_refused() -> None:
    """Neither a grid, nor boxes that are apart in one dimension only, cost the square of their number; what
    would fill memory with pairs or cuts is an error."""
    at = np.arange(40_000, dtype=np.int64)
    grid, sheared = np.stack([at // 200, at % 200], axis=1), np.stack([at, at], axis=1)
    for low, sizes in ((grid, [1, 1]), (sheared, [40_000, 1])):
        boxes = BoxSet(np.zeros(len(at), np.int64), low, low + np.array(sizes))
        assert len(overlapping_pairs(boxes)[0]) == 0
        assert len(intersecting_pairs(boxes, boxes)[0]) == len(at)
    same = BoxSet(np.zeros(40_000, np.int64), np.zeros((40_000, 1), np.int64), np.ones((40_000, 1), np.int64))
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


@examples(120)
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
