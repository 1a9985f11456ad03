"""Which box a rank holds, compared with torch's own sharding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp.planners.layout.local import collect_tensors
from dcp.planners.layout.local_tensor import local_tensor
from dcp.planners.layout.placements import Split, boxes_of_runs, local_runs, local_shape
from dcp.storage.errors import PlanError

PLACEMENTS: list[Placement] = [
    Replicate(),
    Shard(0),
    Shard(1),
    _StridedShard(0, split_factor=2),
    _StridedShard(1, split_factor=3),
]


@pytest.fixture
def ranks() -> Iterator[object]:
    """Starts this process as any rank of a world whose collectives do nothing."""

    def start(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def splits(mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]) -> list[Split]:
    """The sharding steps of placements, left to right."""
    return [
        Split(p.dim, parts, place, int(getattr(p, "split_factor", 1)))  # type: ignore[attr-defined]
        for p, parts, place in zip(placements, mesh, coordinate, strict=True)
        if not isinstance(p, Replicate)
    ]


@settings(deadline=None, max_examples=150)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_runs_agree_with_torch(shape: tuple[int, int], mesh: list[int], data: st.DataObject) -> None:
    """Local shape and first offset of every coordinate are torch's, for plain and strided shards, even or
    not."""
    placements = [data.draw(st.sampled_from(PLACEMENTS)) for _ in mesh]
    for coordinate in itertools.product(*(range(size) for size in mesh)):
        expected_shape, expected_offset = _compute_local_shape_and_global_offset(
            shape, tuple(mesh), list(coordinate), placements
        )
        runs = local_runs(shape, splits(mesh, coordinate, placements))
        assert local_shape(runs) == tuple(expected_shape)
        if math.prod(expected_shape):
            assert boxes_of_runs(runs)[0].offsets == tuple(expected_offset)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (2, 3), (1, 4)], ids=str)
def test_boxes_hold_what_torch_distributes(
    ranks: object, mesh_shape: tuple[int, ...], shape: tuple[int, int]
) -> None:
    """The local tensor of distribute_tensor is, box by box, the global tensor; and the boxes of all ranks
    cover it."""
    world = math.prod(mesh_shape)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    combinations = list(itertools.product(PLACEMENTS, repeat=len(mesh_shape)))
    covered = [torch.zeros(shape, dtype=torch.bool) for _ in combinations]
    for rank in range(world):
        ranks(rank, world)  # type: ignore[operator]
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(mesh_shape), _init_backend=False)
        for placements, seen in zip(combinations, covered, strict=True):
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            local = local_tensor("t", tensor, {})
            assert local is not None
            assert local.shape == shape
            for source, box in local.pieces:
                here = tuple(
                    slice(at, at + size) for at, size in zip(box.local_offsets, box.sizes, strict=True)
                )
                there = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(source[here], whole[there])
                seen[there] = True
    for placements, seen in zip(combinations, covered, strict=True):
        assert seen.all(), placements


def test_strided_shards_give_several_boxes(ranks: object) -> None:
    """FSDP2 over tensor parallelism leaves a rank rows that are apart: a box each, where stock sees one."""
    ranks(0, 4)  # type: ignore[operator]
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False)
    whole = torch.arange(9.0).reshape(9, 1)
    tensor = distribute_tensor(
        whole, mesh, [_StridedShard(0, split_factor=2), Replicate()], src_data_rank=None
    )
    local = local_tensor("t", tensor, {})
    assert local is not None
    assert [(piece.box.offsets, piece.box.sizes) for piece in local.pieces] == [
        ((0, 0), (3, 1)),
        ((5, 0), (2, 1)),
    ]
    assert local.replicated


def test_a_rank_outside_of_the_mesh_has_nothing(ranks: object) -> None:
    """A DTensor on a submesh is left out by ranks that are not in it."""
    ranks(3, 4)  # type: ignore[operator]
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
    tensor = DTensor.from_local(
        torch.zeros(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
    )
    assert local_tensor("t", tensor, {}) is None
    assert collect_tensors({"t": tensor}).columns.fqns == ()


def test_an_empty_shard_has_no_box_but_keeps_the_name(ranks: object) -> None:
    """A rank whose shard is empty still says which tensor there is; an empty tensor keeps one empty chunk."""
    ranks(3, 4)  # type: ignore[operator]
    mesh = DeviceMesh("cpu", torch.arange(4), _init_backend=False)
    short = distribute_tensor(torch.zeros(2, 3), mesh, [Shard(0)], src_data_rank=None)
    empty = distribute_tensor(torch.zeros(0, 5), mesh, [Shard(1)], src_data_rank=None)
    local = collect_tensors({"short": short, "empty": empty}).columns
    assert local.fqns == ("short", "empty")
    assert local.shape_values.tolist() == [2, 3, 0, 5]
    assert local.item_tensors.tolist() == [1]
    assert local.item_sizes.tolist() == [0, 5]


def test_a_pending_reduction_is_refused(ranks: object) -> None:
    """Partial values are summands, not the tensor: the error names it and what to do."""
    ranks(0, 2)  # type: ignore[operator]
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
    tensor = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
    with pytest.raises(PlanError, match=r"'w'.*Partial.*redistribute"):
        collect_tensors({"w": tensor})


def test_a_local_shape_that_placements_do_not_give_is_refused(ranks: object) -> None:
    """A hand-made uneven DTensor would be stored at wrong offsets; it is an error instead."""
    ranks(0, 2)  # type: ignore[operator]
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
    tensor = DTensor.from_local(
        torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
    )
    with pytest.raises(PlanError, match=r"'w'.*\(3,\).*\(2,\)"):
        collect_tensors({"w": tensor})


def test_runs_of_large_dimensions_cost_nothing() -> None:
    """Runs are ranges, never lists of positions: a dimension of a trillion rows is as cheap as ten."""
    runs = local_runs((10**12, 2), [Split(0, 4, 1), Split(0, 3, 2, 2)])
    assert local_shape(runs)[0] == sum(size for _, size in runs[0])
    assert len(runs[0]) == 2
    assert np.all([low >= 250_000_000_000 for low, _ in runs[0]])
