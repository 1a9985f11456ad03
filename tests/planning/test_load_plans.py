"""Load plans. Internal: pure planning on columns, for meshes and overlaps that no few ranks have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.planners.layout.placements import LocalBox
from dcp.planners.load.plan import plan_load
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.wire.codec import (
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from dcp.storage.errors import MissingKeyError, PlanError, ShapeMismatchError
from dcp.storage.formats.index import CheckpointIndex
from tests.support.examples import examples
from tests.support.planning_simulation import (
    ITEM_BYTES,
    Array,
    Disk,
    Held,
    index_of_boxes,
    read,
    save_columns,
    tensor_shapes,
    wanted_columns,
    whole_tensor,
    worlds,
    write,
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


def test_shapes_are_checked() -> None:
    """All tensors of another shape or number of dimensions are named with both shapes."""
    index = stored({"a": (2, 3), "b": (4,), "c": (1,)})
    wanted = wanted_columns({"a": whole((3, 2)), "b": whole((4, 1)), "c": whole((1,))})
    with pytest.raises(ShapeMismatchError) as caught:
        plan_load(index, wanted)
    assert "Size mismatch between saved (2, 3) and current: (3, 2) for 'a'" in str(caught.value)
    assert "Size mismatch between saved (4,) and current: (4, 1) for 'b'" in str(caught.value)
    assert caught.value.fqns == ["a", "b"]


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


@examples(150)
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


def test_several_boxes_of_one_local_tensor_go_to_their_places() -> None:
    """A local tensor made of strided pieces is filled piece by piece."""
    tensor = whole_tensor((8, 2))
    local = np.concatenate([tensor[1:3], tensor[6:8]])
    held = Held((8, 2), local, (LocalBox((1, 0), (2, 2), (0, 0)), LocalBox((6, 0), (2, 2), (2, 0))))
    index = index_of_boxes((8, 2), [((row, 0), (4, 2)) for row in (0, 4)])
    dest = np.zeros((4, 2), np.int64)
    read(plan_load(index, wanted_columns({"t": held})), disk_of(index, tensor), [dest])
    assert np.array_equal(dest, local)


@examples(80)
@given(
    data=st.data(), shapes=tensor_shapes, lowest=st.booleans(), split=st.sampled_from([None, 8, 64, 1 << 20])
)
def test_load_after_save_is_the_identity(
    data: st.DataObject, shapes: dict[str, tuple[int, ...]], lowest: bool, split: int | None
) -> None:
    """Any sharding saved, any other loaded: all elements arrive, each read once, each byte stored once."""
    saving, loading = data.draw(worlds(shapes)), data.draw(worlds(shapes))
    sent = [encode_save_columns(save_columns(tensors)) for tensors in saving]
    columns = [decode_save_columns(part) for part in sent]
    plan = plan_save(columns, dedup_to_lowest_rank=lowest, split_bytes=split, check_coverage=True)
    replies = [decode_write_columns(encode_write_columns(writes)) for writes in plan.writes]
    disk = write(GlobalSavePlan(plan.index, replies), saving)
    stored = sum(payload.size for payload in disk.payloads.values())
    assert stored == sum(whole_tensor(shape).size for shape in shapes.values())
    assert sum(disk.written_bytes) == stored * ITEM_BYTES
    for tensors in loading:
        dests = [np.full(held.local.shape, -1, np.int64) for held in tensors.values()]
        counts = read(plan_load(plan.index, wanted_columns(tensors)), disk, dests)
        for held, dest, count in zip(tensors.values(), dests, counts, strict=True):
            assert np.array_equal(dest, held.local)
            assert (count == 1).all()
