"""What a rank holds. Internal: compared with torch's own rules for meshes that no few ranks have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dcp
from dcp.planners.layout.local import collect_tensors
from dcp.planners.layout.local_tensor import local_tensor
from dcp.planners.layout.placements import Split, boxes_of_runs, local_runs, local_shape
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from tests.support.examples import examples

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


@examples(150)
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


class Wrapper(torch.Tensor):
    """A subclass made of an inner tensor, as torchao's are."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Wrapper:
        """A tensor without memory of its own."""
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)
        wrapper.wrapped = wrapped
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(
            *(value.wrapped if isinstance(value, Wrapper) else value for value in args), **(kwargs or {})
        )


class Opaque(torch.Tensor):
    """One that does not tell what it is made of, as Transformer Engine's were."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Opaque:
        """A tensor without memory of its own."""
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


class Rows(torch.Tensor):
    """A subclass that implements torch's checkpointing protocol: rows 2 and 3 of a tensor of 8 rows."""

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))
        data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([8, 3]))
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_plain_tensors_become_columns() -> None:
    """Names, dtypes, shapes, boxes of tensors and parameters, in order; other values are objects."""
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    state = collect_tensors({"w": weight, "lr": 0.1, "s": torch.tensor(1)})
    local = state.columns
    assert local.fqns == ("w", "s")
    assert [dtypes.BY_CODE[code].name for code in local.dtype_codes.tolist()] == ["bfloat16", "int64"]
    assert local.requires_grad.tolist() == [1, 0]
    assert local.shape_values.tolist() == local.item_sizes.tolist() == [2, 3]
    assert local.shape_start.tolist() == [0, 2, 2]
    assert state.sources[0] is weight
    assert (local.objects.fqns, state.objects) == (("lr",), [0.1])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_stored_dtype_has_its_code() -> None:
    """Each dtype of the format that torch has can be planned."""
    for dtype in dtypes.BY_NAME.values():
        tensor = torch.empty(4, dtype=getattr(torch, dtype.name))
        assert collect_tensors({"t": tensor}).columns.dtype_codes.tolist() == [dtype.code]


def test_the_protocol_of_torch_is_honoured() -> None:
    """A subclass with __create_write_items__ says its boxes and shards itself."""
    local = collect_tensors({"rows": torch.ones(2, 3).as_subclass(Rows)})
    assert local.columns.shape_values.tolist() == [8, 3]
    assert local.columns.item_offsets.tolist() == [2, 0]
    assert local.sources[0].sum() == 6


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.zeros(2, 2).to_sparse(), "to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "to_dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "dequantize"),
    "meta": (lambda: torch.zeros(2, device="meta"), "to_empty"),
    "wrapper": (lambda: Wrapper(torch.zeros(2)), "subclass made of inner tensors"),
    "opaque": (lambda: Opaque(torch.zeros(2)), "no __tensor_flatten__"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "unbind()"),
}


@pytest.mark.filterwarnings("ignore")
def test_unsupported_tensors_are_all_named_with_advice() -> None:
    """One error names every tensor that cannot be saved, and says what to do with each kind."""
    with pytest.raises(PlanError) as caught:
        collect_tensors({"fine": torch.zeros(1), **{name: make() for name, (make, _) in REFUSED.items()}})
    problems = caught.value.problems
    assert len(problems) == len(REFUSED)
    for problem, (name, (_, advice)) in zip(problems, REFUSED.items(), strict=True):
        assert repr(name) in problem
        assert advice in problem


@pytest.mark.parametrize("use", [dcp.save, dcp.load])
def test_a_jagged_tensor_is_named(tmp_path: Path, use: Callable[..., Any]) -> None:
    """It is made of inner tensors and has a size that is no number."""
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    dcp.save({}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match=r"'m\.x': nested tensors cannot be stored; store its values\(\)"):
        use({"m": {"x": jagged}}, checkpoint_id=tmp_path)


def test_lazy_views_are_saved_by_value_and_loaded_into_as_they_are() -> None:
    """A conjugated or negated view is resolved to save it; to load, it must stay the caller's memory."""
    conjugated = torch.tensor([1 + 2j]).conj()
    state = {"conjugated": conjugated, "negated": conjugated.imag, "again": conjugated.resolve_conj()}
    saved = collect_tensors(state).sources
    assert [source.is_conj() or source.is_neg() for source in saved] == [False] * 3
    assert [source.tolist() for source in saved] == [[1 - 2j], [-2.0], [1 - 2j]]
    wanted = collect_tensors(state, purpose="load").sources
    assert wanted[0].data_ptr() == conjugated.data_ptr() and wanted[0].is_conj()


def test_freed_memory_is_refused() -> None:
    """A parameter whose storage FSDP resized to nothing has no values to save."""
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(PlanError, match=r"'w'.*memory was freed"):
        collect_tensors({"w": tensor})


@pytest.mark.parametrize("purpose", ["save", "load"])
def test_memory_that_was_freed_in_part_is_refused(purpose: Literal["save", "load"]) -> None:
    """Beyond the end of a storage that was made smaller lies memory of others, also for views of it."""
    flat = torch.zeros(12)
    state = {"rows": flat.view(3, 4).t(), "tail": flat[8:], "head": flat[:4], "none": flat[12:]}
    collect_tensors(state, purpose=purpose)
    flat.untyped_storage().resize_(4 * 10)
    with pytest.raises(PlanError) as caught:
        collect_tensors(state, purpose=purpose)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["'rows'", "'tail'"]
    assert all("freed in part" in problem for problem in caught.value.problems)
