"""DefaultLoadPlanner: in stock torch's load, subclassed as torch documents, and as columns."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint import default_planner as stock_planner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as torch_flatten
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp.planners.load.planner import DefaultLoadPlanner, uses_columns
from dcp.planners.per_rank import PerRank
from dcp.planners.save.global_plan import plan_save
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.wire.torch_plans import index_from_metadata
from dcp.storage.errors import (
    CheckpointFormatError,
    DtypeMismatchError,
    MissingKeyError,
    PlanError,
    ShapeMismatchError,
    UnsafeObjectError,
)
from dcp.storage.formats.index import CheckpointIndex

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Custom:
    """A class of the user's, which no allow-list knows."""

    value = 3


def index_of(values: dict[str, Any]) -> CheckpointIndex:
    """What a save of ``values`` by one rank would plan."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(values)
    return plan_save([planner.create_local_columns(digests=False).columns]).index


def test_stock_loads_with_it_what_stock_saved(tmp_path: Path) -> None:
    """torch.distributed.checkpoint.load takes the planner; tensors are filled in place, values replaced."""
    weight = torch.arange(12.0).reshape(3, 4)
    stock.save({"m": {"w": weight}, "l": [torch.tensor(5), {"lr": 0.5}], "n": 7}, checkpoint_id=tmp_path)
    target = torch.nn.Parameter(torch.zeros(3, 4))
    loaded: dict[str, Any] = {"m": {"w": target}, "l": [torch.tensor(0), {"lr": 0.0}], "n": 0}
    stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    assert loaded["m"]["w"] is target
    assert torch.equal(target, weight)
    assert loaded["l"][0] == 5
    assert loaded["l"][1] == {"lr": 0.5}
    assert loaded["n"] == 7


def test_values_under_integer_keys_are_replaced(tmp_path: Path) -> None:
    """An optimizer's state[0]['step'] is really loaded; torch's planner leaves it and adds a '0' beside
    it."""
    stock.save({"state": {0: {"step": 9, "m": torch.ones(2)}}}, checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {"state": {0: {"step": 0, "m": torch.zeros(2)}}}
    stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    assert list(loaded["state"]) == [0]
    assert loaded["state"][0]["step"] == 9


def test_flat_state_dicts_are_loaded_in_place(tmp_path: Path) -> None:
    """Without flattening, values land in the caller's own dict."""
    stock.save({"w": torch.ones(2), "n": 3}, checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {"w": torch.zeros(2), "n": 0}
    stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert loaded["n"] == 3
    assert loaded["w"].tolist() == [1, 1]


def test_checkpoints_of_torch_before_2_4_are_found(tmp_path: Path) -> None:
    """Old keys (dicts without tensors kept whole) are recognised and loaded to where they belong."""
    old = {"model": {"w": torch.ones(2)}, "opt": {"lr": 0.5, "betas": {"one": 1}}}
    _version._derived_version = "2_3"
    try:
        stock.save(old, checkpoint_id=tmp_path)
    finally:
        _version._derived_version = None
    assert "opt" in stock.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    loaded: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "opt": {"lr": 0.0, "betas": {"one": 0}}}
    stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    assert loaded["opt"] == old["opt"]
    assert loaded["model"]["w"].tolist() == [1, 1]


class RenamePlanner(DefaultLoadPlanner):
    """torch's documentation: keys are stored with a prefix; all attributes are set without super()."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Rename, then go on."""
        self.original_state_dict = state_dict
        state_dict = {"foo_" + k: v for k, v in state_dict.items()}
        if self.flatten_sharded_tensors:
            state_dict = _flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            state_dict, self.mappings = torch_flatten(state_dict)
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store under the caller's name."""
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class MetaModelMaterialize(DefaultLoadPlanner):
    """torch's documentation: tensors are made while loading."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Other memory."""
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Keep it."""
        self.state_dict[read_item.dest_index.fqn] = tensor


def test_the_renaming_planner_of_the_documentation(tmp_path: Path) -> None:
    """A set-up that leaves super() out and sets torch's attributes is enough."""
    stock.save({"foo_w": torch.ones(2), "foo_n": 5}, checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {"w": torch.zeros(2), "n": 0}
    stock.load(loaded, checkpoint_id=tmp_path, planner=RenamePlanner())
    assert loaded["w"].tolist() == [1, 1]
    assert loaded["n"] == 5
    assert not uses_columns(RenamePlanner())


def test_the_materialising_planner_of_the_documentation(tmp_path: Path) -> None:
    """resolve_tensor and commit_tensor may hand over other memory than the state dict's."""
    stock.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    planner = MetaModelMaterialize()
    original = torch.zeros(2)
    stock.load({"w": original}, checkpoint_id=tmp_path, planner=planner)
    assert planner.state_dict["w"].tolist() == [1, 1]
    assert original.tolist() == [0, 0]
    assert not uses_columns(planner)
    assert uses_columns(DefaultLoadPlanner())


def test_meta_tensors_are_materialised(tmp_path: Path) -> None:
    """Tensors on the meta device become real ones in the caller's state dict, in lists and tuples too."""
    stock.save({"m": {"w": torch.ones(2)}, "l": [torch.full((3,), 2.0)], "p": 1}, checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {
        "m": {"w": torch.empty(2, device="meta")},
        "l": [torch.empty(3, device="meta")],
        "p": 0,
    }
    stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    assert loaded["m"]["w"].tolist() == [1, 1]
    assert loaded["l"][0].tolist() == [2, 2, 2]


def test_dtype_mismatch_is_an_error_unless_cast(tmp_path: Path) -> None:
    """An fp32 checkpoint into bf16 raises and names the tensor; dtype='cast' converts, and says so."""
    stock.save({"w": torch.ones(2), "v": torch.ones(2)}, checkpoint_id=tmp_path)
    loaded = {"w": torch.zeros(2, dtype=torch.bfloat16), "v": torch.zeros(2)}
    with pytest.raises(stock.CheckpointException, match="'w' is bfloat16, stored is float32"):
        stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    planner = DefaultLoadPlanner(dtype="cast")
    stock.load(loaded, checkpoint_id=tmp_path, planner=planner)
    assert loaded["w"].tolist() == [1, 1]
    assert planner.cast_keys == ("w",)


def columns_of(planner: DefaultLoadPlanner, values: dict[str, Any], index: CheckpointIndex) -> Any:
    """Load columns of ``values``."""
    planner.set_up_planner(values)
    return planner.create_load_columns(index)


def test_what_does_not_fit_is_refused() -> None:
    """Missing keys, shapes and dtypes, in the columnar interface."""
    index = index_of({"w": torch.zeros(2, 3), "n": 1})
    cases: list[tuple[dict[str, Any], type[PlanError]]] = [
        ({"w": torch.zeros(2, 3), "x": torch.zeros(1)}, MissingKeyError),
        ({"w": torch.zeros(3, 2)}, ShapeMismatchError),
        ({"w": torch.zeros(2, 3, dtype=torch.int32)}, DtypeMismatchError),
        ({"w": 1}, PlanError),
        ({"n": torch.zeros(1)}, PlanError),
    ]
    for values, error in cases:
        with pytest.raises(error):
            columns_of(DefaultLoadPlanner(), values, index)


def test_partial_loads_report_what_was_missing() -> None:
    """allow_partial_load passes over missing keys and tells them; unexpected ones are told anyway."""
    index = index_of({"w": torch.zeros(2), "old": 1})
    planner = DefaultLoadPlanner(allow_partial_load=True)
    columns, destinations = columns_of(planner, {"w": torch.zeros(2), "new": torch.zeros(3), "lr": 1}, index)
    assert planner.missing_keys == ("new", "lr")
    assert planner.unexpected_keys == ("old",)
    assert columns.dests.tolist() == [0]
    assert len(destinations.tensors) == 2


def test_stored_classes_need_the_callers_word(tmp_path: Path) -> None:
    """An object of an unknown class is refused without running anything, with the ways to allow it."""
    stock.save({"o": Custom()}, checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {"o": None}
    with pytest.raises(stock.CheckpointException, match=r"'o'.*weights_only=False.*add_safe_globals"):
        stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(weights_only=False))
    assert loaded["o"].value == 3


def test_blobs_are_classified() -> None:
    """A refused class is an UnsafeObjectError, damaged bytes are a CheckpointFormatError."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"o": None})
    buffer = io.BytesIO()
    torch.save(Custom(), buffer)
    with pytest.raises(UnsafeObjectError) as caught:
        planner.store_blob("o", buffer.getvalue())
    assert caught.value.fqn == "o"
    for blob in (b"not a pickle at all", b"", buffer.getvalue()[:200]):
        with pytest.raises(CheckpointFormatError) as damaged:
            planner.store_blob("o", blob)
        assert not isinstance(damaged.value, UnsafeObjectError)
    buffer = io.BytesIO()
    torch.save({"a": [1, 2]}, buffer)
    planner.store_blob("o", buffer.getvalue())
    assert planner.original_state_dict == {"o": {"a": [1, 2]}}


def test_per_rank_values_are_taken_by_their_rank() -> None:
    """Each rank finds its own entry below PerRank, and the wrapper holds what was loaded."""
    index = index_of({"rng": {"rank-0": torch.zeros(2), "rank-1": torch.zeros(2)}, "pos": {"rank-1": 5}})
    planner = DefaultLoadPlanner()
    planner.rank = 1
    values = {"rng": PerRank(torch.zeros(2)), "pos": PerRank(0)}
    columns, destinations = columns_of(planner, values, index)
    assert index.chunk_tensors[columns.chunks].tolist() == [index.position["rng.rank-1"]]
    assert destinations.tensors[0] is values["rng"].value
    assert columns.object_fqns == ["pos.rank-1"]
    planner.store_object("pos.rank-1", 5)
    assert values["pos"].value == 5


@pytest.fixture
def fake_ranks() -> Iterator[Any]:
    """Starts this process as one rank of several whose collectives do nothing."""

    def start(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


PLACEMENTS = [
    [Shard(0), Shard(1)],
    [Replicate(), Shard(0)],
    [_StridedShard(0, split_factor=2), Shard(0)],
    [_StridedShard(1, split_factor=2), Shard(1)],
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_shards_are_loaded_through_torchs_protocol(fake_ranks: Any, placements: list[Any]) -> None:
    """Read items of any placement, carried out as torch's readers do, fill each rank's shard exactly."""
    whole = torch.arange(7 * 5).reshape(7, 5)
    quarters = [(slice(0, 4), slice(0, 5)), (slice(4, 7), slice(0, 5))]
    columns = index_of({"w": whole})
    metadata = two_chunks(columns)
    for rank in range(4):
        fake_ranks(rank, 4)
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False)
        expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        target = distribute_tensor(torch.full_like(whole, -1), mesh, placements, src_data_rank=None)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({"w": target}, metadata)
        plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
        for item in plan.items:
            assert item.storage_index.index is not None
            stored = whole[quarters[item.storage_index.index]]
            part = tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
            tensor = planner.resolve_tensor(item)
            tensor.copy_(stored[part])
            planner.commit_tensor(item, tensor)
        assert torch.equal(target.to_local(), expected.to_local())


def two_chunks(index: CheckpointIndex) -> Metadata:
    """torch's metadata of a (7, 5) int64 tensor stored as rows 0 to 3 and 4 to 6."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 5])),
        ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([3, 5])),
    ]
    entry = TensorStorageMetadata(TensorProperties(torch.int64), torch.Size(index.shape(0)), chunks)
    return Metadata({"w": entry})


def test_meta_shards_are_materialised(fake_ranks: Any) -> None:
    """A DTensor on the meta device gets local memory with its placements, shape and uneven local shape."""
    fake_ranks(1, 2)
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
    local = torch.empty(2, 3, device="meta")
    tensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size([5, 3]), stride=(3, 1)
    )
    values: dict[str, Any] = {"w": tensor, "pair": (torch.empty(1, device="meta"), 1)}
    DefaultLoadPlanner().set_up_planner(values)
    assert values["w"].device.type == "cpu"
    assert values["w"].shape == (5, 3)
    assert values["w"].to_local().shape == (2, 3)
    assert values["pair"][0].device.type == "cpu"


def test_metadata_objects_become_the_same_columns(tmp_path: Path) -> None:
    """Names, dtypes, shapes and chunks of torch's metadata as an index, objects beside them."""
    stock.save(
        {"a": torch.ones(2, 3), "b": torch.ones((), dtype=torch.int16), "n": 1}, checkpoint_id=tmp_path
    )
    index = index_from_metadata(stock.FileSystemReader(tmp_path).read_metadata())
    assert dict(index.position) == {"a": 0, "b": 1}
    assert index.shape(0) == (2, 3)
    assert index.dtype(1).name == "int16"
    assert [index.box(chunk) for chunk in range(2)] == [((0, 0), (2, 3)), ((), ())]
    assert list(index.objects.fqns) == ["n"]


def test_it_is_torchs_planner_for_isinstance() -> None:
    """Code that asks for torch's class gets a yes; a planner without metadata says so."""
    planner = DefaultLoadPlanner(True, False, True)
    assert isinstance(planner, stock_planner.DefaultLoadPlanner)
    assert planner.allow_partial_load
    planner.set_up_planner({"w": torch.zeros(1)})
    with pytest.raises(PlanError, match="metadata"):
        planner.create_local_plan()


def test_read_items_name_objects_as_torch_does(tmp_path: Path) -> None:
    """One BYTE_IO item a value, one TENSOR item a chunk, like torch's plan of the same state dict."""
    values = {"w": torch.ones(4, 2), "s": torch.tensor(1.0), "n": 1}
    stock.save(values, checkpoint_id=tmp_path)
    metadata = stock.FileSystemReader(tmp_path).read_metadata()
    plans = []
    for planner in (DefaultLoadPlanner(), stock_planner.DefaultLoadPlanner()):
        planner.set_up_planner(dict(values), metadata)
        plans.append({item.dest_index.fqn: item for item in planner.create_local_plan().items})
    assert plans[0].keys() == plans[1].keys()
    for fqn in ("w", "s"):
        assert plans[0][fqn] == plans[1][fqn]
    assert plans[0]["n"].type == LoadItemType.BYTE_IO
    assert math.prod(plans[0]["w"].lengths) == 8
    assert np.prod(plans[0]["s"].lengths) == 1
