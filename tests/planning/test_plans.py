"""Plans of saves and loads. Internal: pure planning on columns, for meshes and overlaps of no few ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import (
    CheckpointFormatError,
    MissingKeyError,
    PlanError,
    ReplicaMismatchError,
    ShapeMismatchError,
)
from dcp.planners.columns import SaveColumns
from dcp.planners.layout.placements import LocalBox
from dcp.planners.load.plan import plan_load
from dcp.planners.save.dealing import LARGE_OBJECT_BYTES
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.value_digests import NOT_COMPARABLE
from dcp.planners.wire.codec import (
    VERSION,
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from dcp.storage.formats.index import CheckpointIndex
from tests.support.examples import examples
from tests.support.planning_simulation import (
    ITEM_BYTES,
    Array,
    Disk,
    Held,
    Layout,
    held_by,
    index_of_boxes,
    read,
    save_columns,
    tensor_shapes,
    wanted_columns,
    whole_tensor,
    worlds,
    write,
)


def whole(shape: tuple[int, ...], *, number: int = 0, **facts: Any) -> Held:
    """A plain tensor."""
    zeros = (0,) * len(shape)
    return Held(shape, whole_tensor(shape, number), (LocalBox(zeros, shape, zeros),), **facts)


def part(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Held:
    """One box of a sharded tensor."""
    region = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    return Held(shape, whole_tensor(shape)[region], (LocalBox(offsets, sizes, (0,) * len(shape)),))


# -- saves ---------------------------------------------------------------------------------------------------


def test_replicas_are_dealt_out_evenly() -> None:
    """Ten replicated tensors on four ranks: loads differ by less than one small tensor; or, if that is asked
    for, all are the lowest rank's, however large."""
    ranks = [{f"t{number}": whole((8 * (number + 1),), number=number) for number in range(10)}] * 4
    columns = [save_columns(held) for held in ranks]
    disk = write(plan_save(columns), ranks)
    assert sum(disk.written_bytes) == sum(8 * 8 * (number + 1) for number in range(10))
    assert max(disk.written_bytes) - min(disk.written_bytes) <= 8 * 16
    plan = plan_save(columns, dedup_to_lowest_rank=True, split_bytes=16)
    assert [len(writes.sources) for writes in plan.writes] == [10, 0, 0, 0]


def test_a_large_replica_is_split_over_its_holders() -> None:
    """A replicated tensor above split_bytes is written in row ranges, so that all ranks end up level."""
    ranks = [{"big": whole((1000, 4)), "own": part((3 * 200,), (200 * rank,), (200,))} for rank in range(3)]
    plan = plan_save([save_columns(held) for held in ranks], split_bytes=4096)
    disk = write(plan, ranks)
    rows = [plan.index.box(chunk)[0][0] for chunk in plan.index.chunks(plan.index.position["big"])]
    assert len(rows) == 3 and rows == sorted(rows)
    assert max(disk.written_bytes) - min(disk.written_bytes) <= 2 * 4 * 8


def test_parts_of_a_replica_are_as_its_holders_have_to_do() -> None:
    """Whoever has much of its own to write gets a smaller part; together the parts have each element once."""
    for busy in range(3):
        ranks = [{"big": whole((1000, 4))} | {"own": part((600,), (200 * r,), (200,))} for r in range(3)]
        ranks[busy] |= {"more": whole((900,), number=1)}
        plan = plan_save([save_columns(held) for held in ranks], split_bytes=512)
        disk = write(plan, ranks)
        assert sum(disk.written_bytes) == 8 * (4000 + 600 + 900)
        boxes = [plan.index.box(chunk) for chunk in plan.index.chunks(plan.index.position["big"])]
        assert sum(sizes[0] for _, sizes in boxes) == 1000


def test_tied_tensors_are_stored_once() -> None:
    """Tensors with the same memory share a payload, in parts too, where the rank that writes them has them
    tied."""
    for split in (None, 64):
        ranks = [{"a": whole((40,), tie=0), "x": whole((3,), number=5), "b": whole((40,), tie=0)}] * 2
        plan = plan_save([save_columns(held) for held in ranks], split_bytes=split)
        assert sum(write(plan, ranks).written_bytes) == 8 * 43
        assert sum(int((writes.shares >= 0).sum()) for writes in plan.writes) == (1 if split is None else 2)
    ranks = [{name: whole((4,), tie=tie) for name in "ab"} for tie in (0, -1)]
    write(plan_save([save_columns(held) for held in ranks]), ranks)


def test_the_index_lists_chunks_by_tensor_and_position() -> None:
    """Names by first appearance, chunks ascending, payload lengths known, places still open, paths merged."""
    columns = [
        save_columns({"b": part((4, 2), (2, 0), (2, 2))}, planner_data={"b": ("b",)}),
        save_columns(
            {"b": part((4, 2), (0, 0), (2, 2)), "a": whole(())},
            planner_data={"b": ("b",), "a": ("n", 0)},
        ),
    ]
    index = plan_save(columns).index
    assert list(index.fqns) == ["b", "a"]
    assert [index.box(chunk) for chunk in index.chunks(0)] == [((0, 0), (2, 2)), ((2, 0), (2, 2))]
    assert index.payload_lengths.tolist() == [32, 32, 8]
    assert index.chunk_files.tolist() == [0, 0, 0]
    assert index.planner_data == {"b": ("b",), "a": ("n", 0)}


def test_objects_go_to_the_lowest_rank_and_large_ones_are_balanced() -> None:
    """Small values to the lowest holder; values of many bytes each to the least loaded rank."""
    small = [save_columns({}, {"lr": 1, "mine": 2} if rank else {"lr": 1}) for rank in range(3)]
    assert [writes.object_rows.tolist() for writes in plan_save(small).writes] == [[0], [1], []]
    names = {f"o{number}": 1 for number in range(3)}
    large = [save_columns({}, names, object_bytes=LARGE_OBJECT_BYTES + 1)] * 3
    assert [len(writes.objects) for writes in plan_save(large).writes] == [1, 1, 1]


def test_replicas_that_differ_are_refused() -> None:
    """Different digests of one box or object: the error names it, the ranks on each side, and PerRank."""
    ranks = [{"w": whole((4,), digest=digest)} for digest in (5, 5, 9, 0)]
    columns = [save_columns(held, {"seed": 1 + rank % 2}) for rank, held in enumerate(ranks)]
    with pytest.raises(ReplicaMismatchError, match=r"dcp\.PerRank") as caught:
        plan_save(columns)
    assert "tensor 'w', box [0:4]" in str(caught.value)
    assert "ranks 0, 1 have one value, rank 2 has another" in str(caught.value)
    assert "object 'seed' differs: ranks 0, 2 have one value, ranks 1, 3 have another" in str(caught.value)
    assert caught.value.fqns == ["seed", "w"]
    assert plan_save(columns, check_replicas=False).index.chunk_count == 1


@pytest.mark.parametrize("digests", [(0, 7, 7), (7, 0, 7), (7, 7, 0)])
def test_a_value_that_cannot_be_compared_differs_from_one_that_can(digests: tuple[int, ...]) -> None:
    """Opaque on all ranks it is refused, unless the plan was made elsewhere (0); on one alone it is not
    compared."""
    with pytest.raises(ReplicaMismatchError, match=r"'hook' differs: rank.* one value, rank.* another"):
        plan_save([save_columns({}, {"hook": digest}) for digest in digests])
    opaque = [save_columns({}, {"hook": 0})] * 3
    assert [writes.object_rows.tolist() for writes in plan_save(opaque).writes] == [[0], [], []]
    opaque = [save_columns({}, {"hook": NOT_COMPARABLE}) for _ in range(2)]
    with pytest.raises(ReplicaMismatchError, match="'hook' of ranks 0, 1 cannot be compared"):
        plan_save(opaque)
    assert len(plan_save([opaque[0], save_columns({}, {})]).index.objects.fqns) == 1


_T4 = save_columns({"t": whole((4,))})
UNSOUND: dict[str, list[Any]] = {
    "outside of its shape": [_T4, {"t": Held((4,), whole_tensor((3,)), (LocalBox((2,), (3,), (0,)),))}],
    "overlap": [{"t": part((4,), (0,), (3,))}, {"t": part((4,), (2,), (2,))}],
    "2 of its 4 elements": [{"t": part((4,), (0,), (1,))}, {"t": part((4,), (3,), (1,))}],
    r"int64 \[4\] on rank 0, but int64 \[5\] on rank 1": [_T4, {"t": whole((5,))}],
    r"int64 \[4\] on rank 0, but int64 \[4, 1\] on rank 1": [_T4, {"t": whole((4, 1))}],
    r"'t' is int64 \[4\] on rank 0, but float32 \[4\] on ranks 1, 2": [
        _T4,
        *[save_columns({"t": whole((4,))}, dtype_code=1)] * 2,
    ],
    r"'t' is a tensor on rank 0, but another value on rank 1": [_T4, save_columns({}, {"t": 1})],
}


@pytest.mark.parametrize("problem", UNSOUND)
def test_unsound_plans_are_refused(problem: str) -> None:
    """Out of bounds, overlap, a gap, differing shapes, dtypes and kinds: the error names tensor and ranks."""
    columns = [held if isinstance(held, SaveColumns) else save_columns(held) for held in UNSOUND[problem]]
    with pytest.raises(PlanError, match=problem) as caught:
        plan_save(columns)
    assert "'t'" in str(caught.value)


def test_all_gaps_are_told_at_once_and_the_list_is_bounded() -> None:
    """Forty gaps make one error that counts them all and lists the first twenty."""
    names = [f"t{number}" for number in range(40)]
    ranks = [{name: part((4,), (rank,), (1,)) for name in names} for rank in range(2)]
    columns = [save_columns(held) for held in ranks]
    with pytest.raises(PlanError, match=r"40 problems.*and 20 more") as caught:
        plan_save(columns)
    assert len(caught.value.problems) == 20
    assert plan_save(columns[:1]).index.chunk_count == 40  # a rank alone may save its own part, if not asked
    with pytest.raises(PlanError, match="40 problems"):
        plan_save(columns[:1], check_coverage=True)


# -- loads ---------------------------------------------------------------------------------------------------


def stored(shapes: dict[str, tuple[int, ...]], objects: tuple[str, ...] = ()) -> CheckpointIndex:
    """The index of plain tensors and objects."""
    tensors = {fqn: whole(shape) for fqn, shape in shapes.items()}
    return plan_save([save_columns(tensors, dict.fromkeys(objects, 1))]).index


def disk_of(index: CheckpointIndex, tensor: Array) -> Disk:
    """The payloads of an index with one tensor."""
    boxes = [index.box(chunk) for chunk in range(index.chunk_count)]
    regions = [tuple(slice(o, o + n) for o, n in zip(*box, strict=True)) for box in boxes]
    return Disk({chunk: tensor[region].copy() for chunk, region in enumerate(regions)})


def test_missing_keys_are_all_named() -> None:
    """Tensors and objects that are not stored: one error with all, or a list where it is allowed."""
    index = stored({"a": (2,)}, ("lr",))
    wanted = wanted_columns({"a": whole((2,)), "b": whole((3,))}, ["lr", "momentum"])
    with pytest.raises(MissingKeyError, match=r"Missing key in checkpoint state_dict: 'b', 'momentum'"):
        plan_load(index, wanted)
    columns = plan_load(index, wanted, allow_missing=True)
    assert (columns.extra.missing, columns.object_fqns) == (("b", "momentum"), ["lr"])
    assert columns.dests.tolist() == [0]


def test_problems_of_several_kinds_make_one_error() -> None:
    """Missing ones, other kinds, and other shapes or numbers of dimensions are told together."""
    index = stored({"a": (2, 3), "b": (4,), "c": (1,), "t": (1,)}, ("o",))
    wanted = {"a": whole((3, 2)), "b": whole((4, 1)), "c": whole((1,))}
    with pytest.raises(ShapeMismatchError) as shapes:
        plan_load(index, wanted_columns(wanted))
    assert "Size mismatch between saved (2, 3) and current: (3, 2) for 'a'" in str(shapes.value)
    assert "Size mismatch between saved (4,) and current: (4, 1) for 'b'" in str(shapes.value)
    assert shapes.value.fqns == ["a", "b"]
    with pytest.raises(PlanError, match="5 problems") as caught:
        plan_load(index, wanted_columns(wanted | {"o": whole((1,))}, ["t", "gone"]))
    assert type(caught.value) is PlanError
    assert "'o' is a tensor in the state dict, but another value in the checkpoint" in str(caught.value)
    assert "'t' is a tensor in the checkpoint, but no tensor in the state dict" in str(caught.value)
    assert sorted(caught.value.fqns) == ["a", "b", "gone", "o", "t"]


def test_elements_that_are_not_stored_are_refused() -> None:
    """A hole, also one that chunks which lie over each other make up for in volume."""
    index = index_of_boxes((4, 2), [((0, 0), (2, 2)), ((3, 0), (1, 2))])
    with pytest.raises(PlanError, match=r"'t': of the box at \[0, 0\] of sizes \[4, 2\].*stores 6 of 8"):
        plan_load(index, wanted_columns({"t": whole((4, 2))}))
    index = index_of_boxes((6,), [((0,), (3,)), ((1,), (3,))])
    with pytest.raises(PlanError, match="stores 4 of 6"):
        plan_load(index, wanted_columns({"t": whole((6,))}))


boxes_2d = st.tuples(
    st.tuples(st.integers(0, 5), st.integers(0, 5)), st.tuples(st.integers(1, 6), st.integers(1, 6))
)


@examples(150)
@given(extra=st.lists(boxes_2d, max_size=8), cut=st.integers(1, 5), order=st.randoms(use_true_random=False))
def test_overlapping_chunks_are_read_once(extra: list[Any], cut: int, order: Any) -> None:
    """However stored chunks overlap, each wanted element is read exactly once and is right."""
    chunks = [((0, 0), (cut, 6)), ((cut, 0), (6 - cut, 6))]
    chunks += [(at, (min(s[0], 6 - at[0]), min(s[1], 6 - at[1]))) for at, s in extra]
    order.shuffle(chunks)
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


# -- a save and loads of it ----------------------------------------------------------------------------------


def assert_loads(plan: GlobalSavePlan, disk: Disk, world: list[dict[str, Held]]) -> None:
    """Each rank gets all that it wants, each element once."""
    for tensors in world:
        dests = [np.full(held.local.shape, -1, np.int64) for held in tensors.values()]
        counts = read(plan_load(plan.index, wanted_columns(tensors)), disk, dests)
        for held, dest, count in zip(tensors.values(), dests, counts, strict=True):
            assert np.array_equal(dest, held.local)
            assert (count == 1).all()


@examples(80)
@given(
    data=st.data(), shapes=tensor_shapes, lowest=st.booleans(), split=st.sampled_from([None, 8, 64, 1 << 20])
)
def test_load_after_save_is_the_identity(
    data: st.DataObject, shapes: dict[str, tuple[int, ...]], lowest: bool, split: int | None
) -> None:
    """Any sharding saved, any other loaded: all elements arrive, each read once, each byte stored once."""
    saving, loading = data.draw(worlds(shapes)), data.draw(worlds(shapes))
    columns = [decode_save_columns(encode_save_columns(save_columns(tensors))) for tensors in saving]
    plan = plan_save(columns, dedup_to_lowest_rank=lowest, split_bytes=split, check_coverage=True)
    replies = [decode_write_columns(encode_write_columns(writes)) for writes in plan.writes]
    disk = write(GlobalSavePlan(plan.index, replies), saving)
    stored = sum(payload.size for payload in disk.payloads.values())
    assert stored == sum(map(math.prod, shapes.values()))
    assert sum(disk.written_bytes) == stored * ITEM_BYTES
    assert_loads(plan, disk, loading)


def world(*layouts: Layout) -> list[dict[str, Held]]:
    """Some tensors by each of the layouts in turn, or as replicas."""
    shapes = {"even": (240, 3), "uneven": (250,), "few": (5, 4), "one": (), "empty": (0, 2), "cut": (6, 77)}
    ranks: list[dict[str, Held]] = [{} for _ in range(layouts[0].world_size)]
    for number, (fqn, shape) in enumerate(shapes.items()):
        layout = layouts[number % len(layouts)]
        if max((step[0] for step in layout.steps if step), default=0) >= len(shape):
            layout = Layout(layout.mesh, tuple(None for _ in layout.mesh))
        for rank, tensors in enumerate(ranks):
            tensors[fqn] = held_by(whole_tensor(shape, number), layout, rank)
    return ranks


def test_more_than_a_hundred_ranks() -> None:
    """Saved by 120, of which many hold nothing; loaded by 7, and by 144 along the other dimension."""
    ranks = world(
        Layout((120,), ((0, 1),)), Layout((10, 12), (None, (0, 1))), Layout((10, 12), ((0, 1), (0, 2)))
    )
    plan = plan_save([save_columns(tensors) for tensors in ranks], check_coverage=True)
    disk = write(plan, ranks)
    for layout in (Layout((7,), ((0, 1),)), Layout((12, 12), ((1, 1), None))):
        assert_loads(plan, disk, world(layout))


# -- as bytes ------------------------------------------------------------------------------------------------


paths = st.dictionaries(
    st.text(max_size=5), st.lists(st.text(max_size=3) | st.integers(0, 9), max_size=4).map(tuple)
)


@examples(50, quick=10)
@given(
    data=st.data(),
    shapes=tensor_shapes,
    objects=st.dictionaries(st.text(max_size=4), st.integers(0, NOT_COMPARABLE - 1), max_size=3),
    planner_data=st.none() | paths,
)
def test_decoding_is_the_inverse_of_encoding(
    data: st.DataObject, shapes: dict[str, tuple[int, ...]], objects: dict[str, int], planner_data: Any
) -> None:
    """Every column of every rank's plan and of the replies survives, names of any characters included."""
    ranks = data.draw(worlds(shapes))
    sent = [save_columns(tensors, objects, planner_data=planner_data) for tensors in ranks]
    for columns in sent:
        received = decode_save_columns(encode_save_columns(columns))
        np.testing.assert_equal(dataclasses.asdict(received), dataclasses.asdict(columns))
        assert received.item_digests.dtype == np.uint64
    for writes in plan_save(sent).writes:
        received_writes = decode_write_columns(encode_write_columns(writes))
        np.testing.assert_equal(dataclasses.asdict(received_writes), dataclasses.asdict(writes))


def example() -> SaveColumns:
    """A small plan with something in every column."""
    columns = save_columns({"a": whole((2, 3)), "b": whole((4,))}, {"lr": 3}, planner_data={"a": ("a", 0)})
    return dataclasses.replace(columns, stride_orders={0: (1, 0)})


def changed(data: bytes, section: str | None, name: str, value: Any) -> bytes:
    """``data`` with one field replaced."""
    message = msgpack.unpackb(data)
    if section is not None:
        value = msgpack.packb(msgpack.unpackb(message[section]) | {name: value})
    packed: bytes = msgpack.packb(message | {section or name: value})
    return packed


def column(*values: int) -> list[Any]:
    """A column as the codec encodes it."""
    return [len(values), None, 0, 8, 0, np.array(values, "<i8").tobytes()]


HOSTILE = [
    (None, "version", VERSION + 1),
    (None, "items", 7),
    (None, "names", b"\xc1"),
    ("names", "dtypes", column(200, 1)),
    ("names", "ndims", column(2, -1)),
    ("names", "ndims", column(1, 1)),
    ("names", "shapes", column(2, 3, -4)),
    ("names", "shapes", [1 << 40, None, 0, 0, 0, b""]),
    ("names", "orders", [[0, [0, 0]]]),
    ("names", "orders", [[5, [0]]]),
    ("names", "fqns", None),
    ("items", "item_tensors", column(0, 2)),
    ("items", "item_tensors", column(0)),
    ("items", "item_sizes", column(2, 3)),
    ("items", "object_sizes", column()),
    ("items", "item_ties", column(1, 2, 3)),
]
HOSTILE_REPLIES = [
    ("version", 9),
    ("sources", column(1)),
    ("ndims", column(2, 2)),
    ("shares", column(-1, 1)),  # a payload is shared with an earlier row only
    ("shares", column(-2, -1)),
    ("objects", column()),
]


@pytest.mark.parametrize(("section", "name", "value"), HOSTILE, ids=lambda value: str(value)[:20])
def test_malformed_plans_are_refused(section: str | None, name: str, value: Any) -> None:
    """Unknown versions, lying counts, wrong lengths, unknown dtypes: a typed error, never a wrong plan."""
    with pytest.raises(CheckpointFormatError):
        decode_save_columns(changed(encode_save_columns(example()), section, name, value))


@pytest.mark.parametrize(("name", "value"), HOSTILE_REPLIES)
def test_malformed_writes_are_refused(name: str, value: Any) -> None:
    """The same for what the coordinator sends back."""
    data = encode_write_columns(plan_save([example()]).writes[0])
    with pytest.raises(CheckpointFormatError):
        decode_write_columns(changed(data, None, name, value))


@examples(200)
@given(data=st.data())
def test_damaged_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    """Flipping any byte gives a plan or a CheckpointFormatError."""
    encoded = bytearray(encode_save_columns(example()))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointFormatError):
        assert isinstance(decode_save_columns(bytes(encoded)), SaveColumns)
