"""Boxes that each rank saves of a tensor, on meshes that are too large for real processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dcp
from dcp.errors import PlanError

REPLICAS, ROWS, STRIDED = Replicate(), Shard(0), _StridedShard(0, split_factor=2)
PLACEMENTS: list[Placement] = [REPLICAS, ROWS, STRIDED, Shard(1), _StridedShard(1, split_factor=3)]
Mesh = Callable[[int, Sequence[int]], DeviceMesh]
Held = dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """Yield a function that makes this process any rank of a fake world, and returns a mesh of a shape."""

    def start(rank: int, shape: Sequence[int]) -> DeviceMesh:
        if dist.is_initialized():
            dist.destroy_process_group()
        world = math.prod(shape)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=max(world, rank + 1))
        return DeviceMesh("cpu", torch.arange(world).reshape(*shape), _init_backend=False)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def held(state: dict[str, Any]) -> Held:
    """Return the boxes that this rank would save, as (offsets, data) by name."""
    planner, found = dcp.DefaultSavePlanner(), Held()
    planner.set_up_planner(state)
    for item in planner.create_local_plan().items:
        boxes = found.setdefault(item.index.fqn, [])
        if item.tensor_data is not None:
            boxes.append((tuple(item.tensor_data.chunk.offsets), planner.resolve_data(item)))
    return found


def of_local(mesh: DeviceMesh, local: torch.Tensor, placement: Placement, rows: int) -> DTensor:
    """Return a DTensor made from a local tensor."""
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=(rows,), stride=(1,))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (2, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2)], ids=str)
def test_boxes_equal_torchs_distribution(mesh: Mesh, sizes: tuple[int, ...], shape: Any) -> None:
    """The saved boxes equal those regions of the global tensor, and boxes of all ranks cover it, for
    replicas, plain and strided shards, even or uneven."""
    whole, some = torch.arange(math.prod(shape)).reshape(shape), PLACEMENTS[: 5 if len(sizes) < 3 else 3]
    covered = {str(each): torch.zeros(shape) for each in itertools.product(some, repeat=len(sizes))}
    for rank in range(math.prod(sizes)):
        here, ways = mesh(rank, sizes), itertools.product(some, repeat=len(sizes))
        state = {str(way): distribute_tensor(whole, here, way, src_data_rank=None) for way in ways}
        for name, boxes in held(state).items():
            for offsets, data in boxes:
                box = tuple(slice(at, at + size) for at, size in zip(offsets, data.shape, strict=True))
                assert torch.equal(data, whole[box]), (rank, name)
                covered[name][box] = 1
    assert not [name for name, seen in covered.items() if not seen.all()]


def test_boxes_of_a_rank_without_elements(mesh: Mesh) -> None:
    """A rank outside of a DTensor's mesh has no entry, an empty shard no box, an empty tensor one chunk."""
    assert held({"t": of_local(mesh(3, (2,)), torch.zeros(0), ROWS, 4)}) == {}
    here = mesh(3, (4,))
    short = distribute_tensor(torch.zeros(2, 3), here, [ROWS], src_data_rank=None)
    empty = distribute_tensor(torch.zeros(0, 5), here, [Shard(1)], src_data_rank=None)
    found = held({"short": short, "empty": empty})
    assert "short" not in found and [(at, tuple(data.shape)) for at, data in found["empty"]] == [
        ((0, 0), (0, 5))
    ]


def test_inconsistent_dtensors_are_refused(mesh: Mesh) -> None:
    """Partial placements, and DTensors whose local shape would lead to wrong offsets, are refused."""
    here = mesh(0, (2,))
    with pytest.raises(PlanError, match=r"'w'.*Partial.*redistribute"):
        held({"w": of_local(here, torch.zeros(2), Partial(), 2)})
    with pytest.raises(PlanError, match=r"'w'.*\(3,\).*\(2,\)"):
        held({"w": of_local(here, torch.zeros(3), ROWS, 4)})


class _Opaque(torch.Tensor):
    """A wrapper subclass that does not show its inner tensors, as Transformer Engine's were."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> _Opaque:
        made: _Opaque = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


class Rows(torch.Tensor):
    """A subclass with torch's checkpoint protocol: rows 2 and 3 of a tensor of 8 rows."""

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))
        data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([8, 3]))
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_the_protocol_of_torch_is_honoured() -> None:
    """A subclass with __create_write_items__ decides its boxes and shards."""
    ((offsets, data),) = held({"rows": torch.ones(2, 3).as_subclass(Rows)})["rows"]
    assert (offsets, float(data.sum())) == ((2, 0), 6)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.zeros(2, 2).to_sparse(), "to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "to_dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "dequantize"),
    "meta": (lambda: torch.zeros(2, device="meta"), "to_empty"),
    "opaque": (lambda: _Opaque(torch.zeros(2)), "no __tensor_flatten__"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "unbind()"),
}


@pytest.mark.filterwarnings("ignore")
def test_unsupported_tensors_are_all_named_with_advice() -> None:
    """One error names every tensor that cannot be saved, with a remedy for each kind."""
    with pytest.raises(PlanError) as caught:
        held({"fine": torch.zeros(1), **{name: make() for name, (make, _) in REFUSED.items()}})
    problems = caught.value.problems
    assert len(problems) == len(REFUSED)
    for problem, (name, (_, advice)) in zip(problems, REFUSED.items(), strict=True):
        assert repr(name) in problem
        assert advice in problem


def test_freed_memory_is_refused(tmp_path: Path) -> None:
    """A storage that FSDP resized to zero has no values, and a tensor or view beyond the end of a shrunk
    storage would read foreign memory."""
    flat, gone = torch.zeros(12), torch.zeros(4)
    state = {"rows": flat.view(3, 4).t(), "tail": flat[8:], "head": flat[:4], "none": flat[12:]}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    gone.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(4 * 10)
    for act in (dcp.save, dcp.load):
        with pytest.raises(PlanError) as caught:
            act(state, checkpoint_id=tmp_path, no_dist=True)
        message = str(caught.value)
        assert message.count("partly freed") == 2 and "'rows'" in message and "'tail'" in message
    with pytest.raises(PlanError, match=r"'w'.*memory was freed"):
        held({"w": gone})
