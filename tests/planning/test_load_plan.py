"""The load plan: what is refused, what is passed over, and chunks that overlap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.planners.layout.placements import LocalBox
from dcp.planners.load.plan import plan_load
from dcp.planners.save.global_plan import plan_save
from dcp.storage.errors import DtypeMismatchError, MissingKeyError, PlanError, ShapeMismatchError
from dcp.storage.formats.index import CheckpointIndex
from tests.support.planning_simulation import (
    Array,
    Disk,
    Held,
    index_of_boxes,
    read,
    save_columns,
    wanted_columns,
    whole_tensor,
)


def whole(shape: tuple[int, ...]) -> Held:
    """A plain tensor."""
    zeros = (0,) * len(shape)
    return Held(shape, whole_tensor(shape), (LocalBox(zeros, shape, zeros),))


def stored(shapes: dict[str, tuple[int, ...]], objects: tuple[str, ...] = ()) -> CheckpointIndex:
    """The index of plain tensors and objects."""
    tensors = {fqn: whole(shape) for fqn, shape in shapes.items()}
    return plan_save([save_columns(tensors, dict.fromkeys(objects, 1))]).index


def disk_of(index: CheckpointIndex, tensor: Array) -> Disk:
    """The payloads of an index with one tensor."""
    payloads = {}
    for chunk in range(index.chunk_count):
        offsets, sizes = index.box(chunk)
        region = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        payloads[chunk] = tensor[region].copy()
    return Disk(payloads)


def test_missing_keys_are_all_named() -> None:
    """Tensors and objects that are not stored: one MissingKeyError with all, or a list where it is
    allowed."""
    index = stored({"a": (2,)}, ("lr",))
    wanted = wanted_columns({"a": whole((2,)), "b": whole((3,))}, ["lr", "momentum"])
    with pytest.raises(MissingKeyError, match=r"Missing key in checkpoint state_dict: 'b', 'momentum'"):
        plan_load(index, wanted)
    columns = plan_load(index, wanted, allow_missing=True)
    assert columns.extra.missing == ("b", "momentum")
    assert columns.object_fqns == ["lr"]
    assert columns.dests.tolist() == [0]


def test_unexpected_keys_are_reported() -> None:
    """What the checkpoint has and nobody wants is told, not refused."""
    columns = plan_load(
        stored({"a": (2,), "old": (1,)}, ("lr", "junk")), wanted_columns({"a": whole((2,))}, ["lr"])
    )
    assert columns.extra.unexpected == ("old", "junk")


def test_shapes_are_checked() -> None:
    """All tensors of another shape or number of dimensions are named with both shapes."""
    index = stored({"a": (2, 3), "b": (4,), "c": (1,)})
    wanted = wanted_columns({"a": whole((3, 2)), "b": whole((4, 1)), "c": whole((1,))})
    with pytest.raises(ShapeMismatchError) as caught:
        plan_load(index, wanted)
    assert "Size mismatch between saved (2, 3) and current: (3, 2) for 'a'" in str(caught.value)
    assert "Size mismatch between saved (4,) and current: (4, 1) for 'b'" in str(caught.value)
    assert caught.value.fqns == ["a", "b"]


def test_dtypes_are_checked_unless_cast() -> None:
    """Another dtype is an error that says how to convert, or reported when conversion was asked for."""
    index = plan_save([save_columns({"a": whole((2,))}, dtype_code=1)]).index
    with pytest.raises(DtypeMismatchError, match=r"(?s)'a' is int64, stored is float32.*cast"):
        plan_load(index, wanted_columns({"a": whole((2,))}))
    assert plan_load(index, wanted_columns({"a": whole((2,))}), cast=True).extra.cast == ("a",)


def test_problems_of_several_kinds_make_one_error() -> None:
    """Missing, shape, and kind problems are told together."""
    index = stored({"a": (2,), "t": (1,)}, ("o",))
    wanted = wanted_columns({"a": whole((3,)), "o": whole((1,))}, ["t", "gone"])
    with pytest.raises(PlanError, match="4 problems") as caught:
        plan_load(index, wanted)
    assert type(caught.value) is PlanError
    assert "'o' is a tensor in the state dict, but another value in the checkpoint" in str(caught.value)
    assert "'t' is a tensor in the checkpoint, but no tensor in the state dict" in str(caught.value)
    assert sorted(caught.value.fqns) == ["a", "gone", "o", "t"]


def test_elements_that_are_not_stored_are_refused() -> None:
    """A checkpoint with a hole loads nothing into it silently."""
    index = index_of_boxes((4, 2), [((0, 0), (2, 2)), ((3, 0), (1, 2))])
    with pytest.raises(PlanError, match=r"'t': of the box at \[0, 0\] of sizes \[4, 2\].*stores 6 of 8"):
        plan_load(index, wanted_columns({"t": whole((4, 2))}))


def test_overlapping_chunks_do_not_hide_a_hole() -> None:
    """Two chunks over each other and a gap of the same size: the volumes add up, and it is still refused."""
    index = index_of_boxes((6,), [((0,), (3,)), ((1,), (3,))])
    with pytest.raises(PlanError, match="stores 4 of 6"):
        plan_load(index, wanted_columns({"t": whole((6,))}))


boxes_2d = st.tuples(
    st.tuples(st.integers(0, 5), st.integers(0, 5)), st.tuples(st.integers(1, 6), st.integers(1, 6))
)


@settings(deadline=None, max_examples=150)
@given(extra=st.lists(boxes_2d, max_size=8), cut=st.integers(1, 5), order=st.randoms(use_true_random=False))
def test_overlapping_chunks_are_read_once(
    extra: list[tuple[tuple[int, int], tuple[int, int]]], cut: int, order: object
) -> None:
    """However stored chunks overlap, each wanted element is read exactly once and is right."""
    chunks = [((0, 0), (cut, 6)), ((cut, 0), (6 - cut, 6))]
    chunks += [(at, (min(s[0], 6 - at[0]), min(s[1], 6 - at[1]))) for at, s in extra]
    order.shuffle(chunks)  # type: ignore[attr-defined]
    index, tensor = index_of_boxes((6, 6), chunks), whole_tensor((6, 6))
    held = Held((6, 6), tensor[1:5, 2:6], (LocalBox((1, 2), (4, 4), (0, 0)),))
    dest = np.full((4, 4), -1, np.int64)
    counts = read(plan_load(index, wanted_columns({"t": held})), disk_of(index, tensor), [dest])
    assert np.array_equal(dest, held.local)
    assert (counts[0] == 1).all()


def test_replicated_scalars_are_read_once() -> None:
    """A 0-d tensor that a foreign writer stored twice is read from one place."""
    index = index_of_boxes((), [((), ()), ((), ())])
    assert len(plan_load(index, wanted_columns({"t": whole(())})).chunks) == 1


def test_several_boxes_of_one_local_tensor_go_to_their_places() -> None:
    """A local tensor made of strided pieces is filled piece by piece."""
    tensor = whole_tensor((8, 2))
    local = np.concatenate([tensor[1:3], tensor[6:8]])
    held = Held((8, 2), local, (LocalBox((1, 0), (2, 2), (0, 0)), LocalBox((6, 0), (2, 2), (2, 0))))
    index = index_of_boxes((8, 2), [((row, 0), (4, 2)) for row in (0, 4)])
    dest = np.zeros((4, 2), np.int64)
    read(plan_load(index, wanted_columns({"t": held})), disk_of(index, tensor), [dest])
    assert np.array_equal(dest, local)


def test_many_chunks_against_many_boxes() -> None:
    """10,000 row chunks loaded as 10,000 column boxes of a grid stay a plan of the grid's cells."""
    index = index_of_boxes((100, 100), [((i, j), (1, 1)) for i, j in itertools.product(range(100), repeat=2)])
    boxes = tuple(LocalBox((0, column), (100, 1), (0, column)) for column in range(100))
    held = Held((100, 100), whole_tensor((100, 100)), boxes)
    columns = plan_load(index, wanted_columns({"t": held}))
    assert len(columns.chunks) == 10_000
    assert (columns.lengths == 1).all()


def test_empty_tensors_need_no_reads() -> None:
    """Tensors without elements are satisfied by their shape alone."""
    columns = plan_load(
        stored({"e": (0, 3), "a": (1,)}), wanted_columns({"e": whole((0, 3)), "a": whole((1,))})
    )
    assert columns.dests.tolist() == [1]
