"""One box at a time, against arrays of which it is cut."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.geometry.boxes import Box, contiguous_position, range_boxes, split_box


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


@settings(max_examples=200, deadline=None)
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


@given(case=shaped(1), by=st.lists(st.integers(-5, 5), min_size=3, max_size=3))
def test_a_box_is_the_same_from_anywhere(case: tuple[tuple[int, ...], list[Box]], by: list[int]) -> None:
    """Moving it and looking from there are inverse; so are an order of the dimensions and its inverse."""
    shape, (box,) = case
    assert box.moved(by[: len(shape)]).seen_from(by[: len(shape)]) == box
    assert Box.between(box.offsets, box.high) == box
    turn = np.random.default_rng(len(by)).permutation(len(shape)).tolist()
    assert box.permuted(turn).permuted(np.argsort(turn).tolist()) == box
    assert Box.whole(shape).intersection(box) == (box if box.volume else None)


@settings(max_examples=200, deadline=None)
@given(case=shaped(1))
def test_a_box_is_contiguous_where_its_elements_follow_one_another(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    """And then its position is that of the first one."""
    shape, (box,) = case
    if not box.volume:
        return
    places = elements(shape, box)
    is_run = places == [*range(places[0], places[0] + len(places))]
    assert contiguous_position(shape, box) == (places[0] if is_run else None)


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), max_size=4), ends=st.tuples(st.integers(0, 1300), st.integers(0, 1300))
)
def test_a_range_of_elements_is_a_few_boxes(shape: list[int], ends: tuple[int, int]) -> None:
    """They have its elements in their order, and are at most two a dimension."""
    begin, end = sorted(min(at, math.prod(shape)) for at in ends)
    boxes = [*range_boxes(shape, begin, end)]
    assert [place for box in boxes for place in elements(tuple(shape), box)] == [*range(begin, end)]
    assert len(boxes) <= max(1, 2 * len(shape))
