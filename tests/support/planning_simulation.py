"""Ranks simulated in one process: layouts, columns, and a save and load of numpy arrays by plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from dcp.planners.columns import LoadColumns, SaveColumns, SaveObjects, WantedColumns
from dcp.planners.layout.placements import LocalBox, Split, boxes_of_runs, local_runs
from dcp.planners.save.global_plan import GlobalSavePlan
from dcp.storage.formats.index import CheckpointIndex, Path, starts

Array = npt.NDArray[np.int64]
DTYPE_CODE = 9
ITEM_BYTES = 8


@dataclass(frozen=True)
class Layout:
    """A mesh and what each of its dimensions does to a tensor: (dim, split factor), or None for replicas."""

    mesh: tuple[int, ...]
    steps: tuple[tuple[int, int] | None, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.mesh)

    def splits(self, rank: int) -> list[Split]:
        """The sharding steps as a rank takes them."""
        coordinate = np.unravel_index(rank, self.mesh)
        return [
            Split(step[0], parts, int(place), step[1])
            for step, parts, place in zip(self.steps, self.mesh, coordinate, strict=True)
            if step is not None
        ]


@dataclass(frozen=True)
class Held:
    """What a rank holds of a tensor: its local array and the boxes in it."""

    shape: tuple[int, ...]
    local: Array
    boxes: tuple[LocalBox, ...]
    tie: int = -1
    digest: int = 0


def held_by(whole: Array, layout: Layout, rank: int) -> Held:
    """The local array and boxes of a rank."""
    runs = local_runs(whole.shape, layout.splits(rank))
    rows = [np.array([at for low, size in dim for at in range(low, low + size)], np.int64) for dim in runs]
    local = whole[np.ix_(*rows)] if whole.ndim else whole
    boxes = boxes_of_runs(runs)
    if not whole.size:
        zeros = (0,) * whole.ndim
        local, boxes = whole, (LocalBox(zeros, whole.shape, zeros),)
    return Held(whole.shape, local.copy(), boxes)


def save_columns(
    tensors: Mapping[str, Held],
    objects: Mapping[str, int] | None = None,
    *,
    planner_data: Mapping[str, Path] | None = None,
    dtype_code: int = DTYPE_CODE,
    object_bytes: int = 8,
) -> SaveColumns:
    """Columns of one rank; ``objects`` are digests by name."""
    items = [(row, held, box) for row, held in enumerate(tensors.values()) for box in held.boxes]
    objects = objects or {}
    return SaveColumns(
        fqns=tuple(tensors),
        dtype_codes=np.full(len(tensors), dtype_code, np.uint8),
        requires_grad=np.zeros(len(tensors), np.uint8),
        shape_start=starts([len(held.shape) for held in tensors.values()]),
        shape_values=_flat(held.shape for held in tensors.values()),
        item_tensors=np.array([row for row, _, _ in items], np.int64),
        item_offsets=_flat(box.offsets for _, _, box in items),
        item_sizes=_flat(box.sizes for _, _, box in items),
        item_local_offsets=_flat(box.local_offsets for _, _, box in items),
        item_sources=np.array([row for row, _, _ in items], np.int64),
        item_sharded=np.ones(len(items), np.uint8),
        item_digests=np.array([held.digest for _, held, _ in items], np.uint64),
        item_ties=np.array([held.tie for _, held, _ in items], np.int64),
        objects=SaveObjects(
            tuple(objects),
            np.array(list(objects.values()), np.uint64),
            np.full(len(objects), object_bytes, np.int64),
        ),
        planner_data=planner_data,
    )


def wanted_columns(tensors: Mapping[str, Held], objects: Sequence[str] = ()) -> WantedColumns:
    """What one rank wants: all its boxes."""
    return WantedColumns(**save_columns(tensors).held(), object_fqns=tuple(objects))


def _flat(rows: Iterable[tuple[int, ...]]) -> Array:
    return np.array(list(itertools.chain.from_iterable(rows)), np.int64)


@dataclass
class Disk:
    """Payloads by chunk row, and how often each was written."""

    payloads: dict[int, Array] = field(default_factory=dict)
    written_bytes: list[int] = field(default_factory=list)


def write(plan: GlobalSavePlan, ranks: Sequence[Mapping[str, Held]]) -> Disk:
    """Carry out a save plan; asserts that no chunk is written twice."""
    disk = Disk()
    for writes, tensors in zip(plan.writes, ranks, strict=True):
        total = 0
        locals_ = [held.local for held in tensors.values()]
        for row, chunk in enumerate(writes.chunks.tolist()):
            box = slice(int(writes.box_start[row]), int(writes.box_start[row + 1]))
            where = zip(writes.local_offsets[box].tolist(), writes.sizes[box].tolist(), strict=True)
            source = locals_[int(writes.sources[row])]
            assert chunk not in disk.payloads, "a chunk is written twice"
            disk.payloads[chunk] = source[tuple(slice(at, at + size) for at, size in where)].copy()
            assert list(disk.payloads[chunk].shape) == writes.sizes[box].tolist()
            if writes.shares[row] >= 0:
                shared = disk.payloads[int(writes.chunks[int(writes.shares[row])])]
                assert np.array_equal(shared, disk.payloads[chunk]), "a shared payload differs"
            else:
                total += disk.payloads[chunk].nbytes
        disk.written_bytes.append(total)
    assert sorted(disk.payloads) == list(range(plan.index.chunk_count))
    return disk


def read(columns: LoadColumns, disk: Disk, dests: Sequence[Array]) -> list[Array]:
    """Carry out a load plan into ``dests``; returns how often each element was read."""
    counts = [np.zeros(dest.shape, np.int64) for dest in dests]
    for row, chunk in enumerate(columns.chunks.tolist()):
        box = slice(int(columns.box_start[row]), int(columns.box_start[row + 1]))
        lengths = columns.lengths[box].tolist()

        def region(offsets: Array, lengths: list[int] = lengths) -> tuple[slice, ...]:
            pairs = zip(offsets.tolist(), lengths, strict=True)
            return tuple(slice(at, at + size) for at, size in pairs)

        dest = int(columns.dests[row])
        target = region(columns.dest_offsets[box])
        assert dests[dest][target].shape == tuple(lengths), "a destination reaches outside of its tensor"
        dests[dest][target] = disk.payloads[chunk][region(columns.storage_offsets[box])]
        counts[dest][target] += 1
    return counts


def index_of_boxes(
    shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], fqn: str = "t"
) -> CheckpointIndex:
    """A foreign index of one tensor with just these chunks."""
    return CheckpointIndex(
        format="torch_dcp",
        fqns=(fqn,),
        dtype_codes=np.array([DTYPE_CODE], np.uint8),
        shape_start=starts([len(shape)]),
        shape_values=np.array(shape, np.int64),
        requires_grad=np.zeros(1, np.uint8),
        chunk_start=starts([len(boxes)]),
        chunk_offsets=_flat(offsets for offsets, _ in boxes),
        chunk_sizes=_flat(sizes for _, sizes in boxes),
        chunk_files=np.zeros(len(boxes), np.int64),
    )


MESHES = [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 3), (4, 2), (2, 2, 2)]


@st.composite
def layouts(draw: st.DrawFn, ndim: int, mesh: tuple[int, ...]) -> Layout:
    """Any sharding of a tensor over ``mesh``: several mesh dimensions may cut one tensor dimension."""
    choices: list[st.SearchStrategy[tuple[int, int] | None]] = [st.none()]
    if ndim:
        choices.append(st.tuples(st.integers(0, ndim - 1), st.sampled_from([1, 1, 2, 3])))
    return Layout(mesh, tuple(draw(st.one_of(*choices)) for _ in mesh))


@st.composite
def worlds(draw: st.DrawFn, shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, Held]]:
    """What each rank of some mesh holds of tensors whose elements are all different."""
    mesh = draw(st.sampled_from(MESHES))
    ranks: list[dict[str, Held]] = [{} for _ in range(math.prod(mesh))]
    for number, (fqn, shape) in enumerate(shapes.items()):
        whole = whole_tensor(shape, number)
        layout = draw(layouts(len(shape), mesh))
        for rank, tensors in enumerate(ranks):
            tensors[fqn] = held_by(whole, layout, rank)
    return ranks


def whole_tensor(shape: tuple[int, ...], number: int = 0) -> Array:
    """A tensor whose elements tell which they are."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape) + number * 1_000_000


tensor_shapes = st.dictionaries(
    st.sampled_from(["a", "b.c", "d.0"]),
    st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple),
    min_size=1,
    max_size=3,
)
