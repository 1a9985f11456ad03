"""Strides against those of numpy, and many boxes at once against one at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.geometry.boxes import Box, contiguous_position
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

shapes = st.lists(st.integers(1, 5), max_size=4)


@given(shape=shapes, data=st.data())
def test_a_permuted_array_is_dense_in_the_order_it_was_permuted_from(
    shape: list[int], data: st.DataObject
) -> None:
    """And C-ordered only if that changes nothing."""
    turn = data.draw(st.permutations(range(len(shape))))
    array = np.empty(shape, np.uint8).transpose(turn)
    order = dense_order(array.shape, array.strides)
    assert order is not None
    assert array.transpose(order).flags.c_contiguous
    assert is_c_ordered(array.shape, array.strides) == array.flags.c_contiguous
    assert extent(array.shape, array.strides) == array.size


@given(shape=shapes, steps=st.lists(st.integers(2, 3), min_size=4, max_size=4))
def test_arrays_with_gaps_or_repeats_are_not_dense(shape: list[int], steps: list[int]) -> None:
    """Every step-th element, or one that stands for several."""
    whole = np.empty([n * step for n, step in zip(shape, steps, strict=False)], np.uint8)
    array = whole[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    if array.size > 1:
        assert dense_order(array.shape, array.strides) is None
    repeated = np.broadcast_to(np.empty(shape, np.uint8), (2, *shape))
    assert dense_order(repeated.shape, repeated.strides) is None
    assert extent(array.shape, array.strides, 1) <= whole.size


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), itemsize=st.sampled_from([1, 2, 8]))
def test_c_strides_are_those_of_torch(shape: list[int], itemsize: int) -> None:
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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
