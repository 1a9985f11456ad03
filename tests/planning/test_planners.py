"""Our planners inside stock torch's save and load, subclassed as torch documents, between real processes."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint import default_planner as stock_planner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as torch_flatten
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as StockLoadPlanner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as StockSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlan, SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dcp import DefaultLoadPlanner, DefaultSavePlanner, PerRank
from dcp.errors import (
    PlanError,
)
from tests.support.ranks import RankRaised, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    """A little of everything."""
    return {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, dtype=torch.bfloat16)},
        "list": [torch.tensor(3), {"lr": 0.5}],
        "epoch": 7,
    }


def empty_state() -> dict[str, Any]:
    """The same structure to load into."""
    return {
        "model": {"w": torch.zeros(3, 4), "b": torch.zeros(4, dtype=torch.bfloat16)},
        "list": [torch.tensor(0), {"lr": 0.0}],
        "epoch": 0,
    }


def assert_loaded(loaded: dict[str, Any]) -> None:
    """``loaded`` is `state()`."""
    expected = state()
    assert torch.equal(loaded["model"]["w"], expected["model"]["w"])
    assert torch.equal(loaded["model"]["b"], expected["model"]["b"])
    assert loaded["list"][0] == 3
    assert loaded["list"][1] == {"lr": 0.5}
    assert loaded["epoch"] == 7


@pytest.mark.parametrize("flatten", [True, False])
def test_plans_and_metadata_are_those_of_torch(flatten: bool) -> None:
    """Same items, same metadata entries, same planner data as torch's planner makes, in the same order."""
    values = state() if flatten else {"w": torch.zeros(2), "epoch": 7}
    ours, theirs = DefaultSavePlanner(flatten), stock_planner.DefaultSavePlanner(flatten)
    results = []
    for planner in (ours, theirs):
        planner.set_up_planner(values, is_coordinator=True)
        local = planner.create_local_plan()
        plans, metadata = planner.create_global_plan([local])
        results.append((local, plans[0], metadata))
    (own_local, own_plan, own), (torch_local, torch_plan, torchs) = results
    assert [item.index for item in own_local.items] == [item.index for item in torch_local.items]
    for mine, other in zip(own_plan.items, torch_plan.items, strict=True):
        assert (mine.index, mine.index.index, mine.type) == (other.index, other.index.index, other.type)
        assert mine.tensor_data == other.tensor_data
    assert own.state_dict_metadata == torchs.state_dict_metadata
    assert list(own.state_dict_metadata) == list(torchs.state_dict_metadata)
    assert own.planner_data == torchs.planner_data


def test_the_save_planner_is_torchs_for_isinstance() -> None:
    """Code that asks for torch's class gets a yes, and the arguments are torch's."""
    planner = DefaultSavePlanner(True, False, None, True, True)
    assert isinstance(planner, stock_planner.DefaultSavePlanner)
    assert not planner.flatten_sharded_tensors
    assert planner.dedup_save_to_lowest_rank
    assert planner.enable_plan_caching


def test_torchs_shared_caches_stay_empty(tmp_path: Path) -> None:
    """With plan caching on, nothing is put into the caches that all planners of a process share."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step in range(2):
        stock.save({"w": torch.full((3,), float(step))}, checkpoint_id=tmp_path / str(step), planner=planner)
    assert not SavePlanner._cached_save_plan
    assert not SavePlanner._cached_global_plan
    assert not SavePlanner._cached_metadata
    loaded = {"w": torch.zeros(3)}
    stock.load(loaded, checkpoint_id=tmp_path / "1")
    assert loaded["w"].tolist() == [1, 1, 1]


class RenameSavePlanner(DefaultSavePlanner):
    """torch's documentation: all keys get a prefix."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Rename, then go on."""
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class FP16Planner(DefaultSavePlanner):
    """torch's documentation: plan and data changed in tandem."""

    def create_local_plan(self) -> SavePlan:
        """Change the plan."""
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        """Change the data."""
        item = super().resolve_data(write_item)
        return item.to(torch.float16) if isinstance(item, torch.Tensor) else item


class DDPLoadBalancingPlanner(DefaultSavePlanner):
    """torch's documentation: rank 0's items dealt out in turn."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        """Change the global step."""
        iters = [iter(all_plans[0].items)] * len(all_plans)
        items_per_rank = [
            [item for item in items if item is not None] for items in zip(*zip_longest(*iters), strict=True)
        ]
        all_plans = [
            replace(plan, items=items) for plan, items in zip(all_plans, items_per_rank, strict=True)
        ]
        return super().create_global_plan(all_plans)


class SaveExtraDataPlanner(DefaultSavePlanner):
    """torch's documentation: planner data of one's own, merged in the global plan."""

    def create_local_plan(self) -> SavePlan:
        """Change the plan."""
        return replace(super().create_local_plan(), planner_data="per-rank-data")

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        """Change the global step."""
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=[plan.planner_data for plan in plans])


def test_the_renaming_save_planner_of_the_documentation(tmp_path: Path) -> None:
    """Keys are stored renamed; the planner keeps the columnar path, since only the set-up is overridden."""
    stock.save({"w": torch.ones(2), "n": 1}, checkpoint_id=tmp_path, planner=RenameSavePlanner())
    loaded: dict[str, Any] = {"foo_w": torch.zeros(2), "foo_n": 0}
    stock.load(loaded, checkpoint_id=tmp_path)
    assert loaded["foo_w"].tolist() == [1, 1]
    assert loaded["foo_n"] == 1


def test_the_half_precision_planner_of_the_documentation(tmp_path: Path) -> None:
    """What the local plan says about dtypes is what the metadata says and what is stored."""
    stock.save(state(), checkpoint_id=tmp_path, planner=FP16Planner())
    metadata = stock.FileSystemReader(tmp_path).read_metadata()
    entry = metadata.state_dict_metadata["model.w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.properties.dtype == torch.float16
    loaded = {"model": {"w": torch.zeros(3, 4, dtype=torch.float16)}}
    stock.load(loaded, checkpoint_id=tmp_path)
    assert loaded["model"]["w"].sum() == 66


def test_the_load_balancing_planner_of_the_documentation() -> None:
    """Plans rearranged before the global step are taken as they are."""
    planner = DDPLoadBalancingPlanner()
    planner.set_up_planner({f"t{number}": torch.zeros(4) for number in range(5)} | {"lr": 1})
    plans, metadata = planner.create_global_plan([planner.create_local_plan() for _ in range(2)])
    assert [[item.index.fqn for item in plan.items] for plan in plans] == [
        ["t0", "t2", "t4"],
        ["t1", "t3", "lr"],
    ]
    assert isinstance(metadata.state_dict_metadata["lr"], BytesStorageMetadata)


def test_the_extra_data_planner_of_the_documentation(tmp_path: Path) -> None:
    """Planner data that are no paths are tolerated and passed on."""
    stock.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=SaveExtraDataPlanner())
    assert stock.FileSystemReader(tmp_path).read_metadata().planner_data == ["per-rank-data"]


def planned(
    ranks: list[dict[str, Any]], **options: Any
) -> tuple[list[DefaultSavePlanner], list[SavePlan], Any]:
    """Local plans of simulated ranks, sent as torch sends them (pickled), and the global plan of them."""
    planners = []
    for number, values in enumerate(ranks):
        planner = DefaultSavePlanner(**options)
        planner.rank = number
        planner.set_up_planner(values)
        planners.append(planner)
    sent = [pickle.loads(pickle.dumps(planner.create_local_plan())) for planner in planners]
    plans, metadata = planners[0].create_global_plan(sent)
    return planners, plans, metadata


def test_split_replicas_resolve_to_their_rows() -> None:
    """A replicated tensor cut over two ranks: each item's data is just its part of the local tensor."""
    values: dict[str, Any] = {"w": torch.arange(40.0).reshape(10, 4), "n": 3}
    planners, plans, metadata = planned([values, values], split_bytes=64)
    parts = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            if item.tensor_data is not None:
                data = planner.resolve_data(item)
                assert data.shape == item.tensor_data.chunk.sizes
                parts[item.tensor_data.chunk.offsets[0]] = data
    assert sorted(parts) == [chunk.offsets[0] for chunk in metadata.state_dict_metadata["w"].chunks] == [0, 5]
    assert torch.equal(torch.cat([parts[at] for at in sorted(parts)]), values["w"])


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Custom:
    """A class of the user's, which no allow-list knows."""

    value = 3


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


class RenameLoadPlanner(DefaultLoadPlanner):
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


def test_the_renaming_load_planner_of_the_documentation(tmp_path: Path) -> None:
    """A set-up that leaves super() out and sets torch's attributes is enough."""
    stock.save({"foo_w": torch.ones(2), "foo_n": 5}, checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {"w": torch.zeros(2), "n": 0}
    stock.load(loaded, checkpoint_id=tmp_path, planner=RenameLoadPlanner())
    assert loaded["w"].tolist() == [1, 1]
    assert loaded["n"] == 5


def test_the_materialising_planner_of_the_documentation(tmp_path: Path) -> None:
    """resolve_tensor and commit_tensor may hand over other memory than the state dict's."""
    stock.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    planner = MetaModelMaterialize()
    original = torch.zeros(2)
    stock.load({"w": original}, checkpoint_id=tmp_path, planner=planner)
    assert planner.state_dict["w"].tolist() == [1, 1]
    assert original.tolist() == [0, 0]


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


def test_stored_classes_need_the_callers_word(tmp_path: Path) -> None:
    """An object of an unknown class is refused without running anything, with the ways to allow it."""
    stock.save({"o": Custom()}, checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {"o": None}
    with pytest.raises(stock.CheckpointException, match=r"'o'.*weights_only=False.*add_safe_globals"):
        stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    stock.load(loaded, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(weights_only=False))
    assert loaded["o"].value == 3


def test_the_load_planner_is_torchs_for_isinstance() -> None:
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


WHOLE = torch.arange(9 * 10, dtype=torch.float32).reshape(9, 10)
LAYOUTS: dict[str, list[Any]] = {
    "fsdp": [Shard(0), Shard(0)],
    "hsdp": [Replicate(), Shard(1)],
    "tp": [Shard(0), Shard(1)],
    "strided": [_StridedShard(0, split_factor=2), Shard(0)],
}


def rank_state(values: torch.Tensor, names: list[str], rank: int) -> dict[str, Any]:
    """All layouts of ``values``, a replicated tensor, and what differs by rank."""
    mesh = init_device_mesh("cpu", (2, 2))
    sharded = {name: distribute_tensor(values, mesh, LAYOUTS[name], src_data_rank=None) for name in names}
    return {
        "sharded": sharded,
        "plain": values.clone(),
        "rng": PerRank(torch.full((2,), float(values[0, 1]) * rank)),
        "step": int(values[0, 1]),
    }


def save_and_load(rank: int, world_size: int, folder: str, saver: str, loader: str) -> None:
    """Save with one planner, load with another, compare every rank's shard."""
    warnings.simplefilter("ignore")
    # stock's planner cannot store uneven strided shards rightly, so it is not asked to
    names = [name for name in LAYOUTS if name != "strided" or (saver, loader) == ("ours", "ours")]
    planners: Any = {
        "ours": lambda: DefaultSavePlanner(split_bytes=128),
        "stock": StockSavePlanner,
    }
    values = rank_state(WHOLE, names, rank)
    if saver == "stock":
        values["rng"] = {f"rank-{rank}": values["rng"].value}
    stock.save(values, checkpoint_id=folder, planner=planners[saver]())
    target = rank_state(torch.full_like(WHOLE, -1.0), names, rank)
    if loader == "stock":
        target["rng"] = {f"rank-{rank}": target["rng"].value}
    stock.load(
        target, checkpoint_id=folder, planner=DefaultLoadPlanner() if loader == "ours" else StockLoadPlanner()
    )
    expected = rank_state(WHOLE, names, rank)
    for name in names:
        assert torch.equal(target["sharded"][name].to_local(), expected["sharded"][name].to_local()), name
    assert torch.equal(target["plain"], WHOLE)
    assert target["step"] == 1
    loaded = target["rng"].value if loader == "ours" else target["rng"][f"rank-{rank}"]
    assert loaded.tolist() == [rank, rank]


@pytest.mark.parametrize(("saver", "loader"), [("ours", "ours"), ("ours", "stock"), ("stock", "ours")])
def test_stock_save_and_load_with_any_planners(tmp_path: Path, saver: str, loader: str) -> None:
    """Four ranks, every layout: what either planner saves, the other loads, shard by shard."""
    run_ranks(4, save_and_load, str(tmp_path), saver, loader)


def save_different(rank: int, world_size: int, folder: str) -> None:
    """The same name with another value on each rank."""
    stock.save({"seed": torch.tensor([rank])}, checkpoint_id=folder, planner=DefaultSavePlanner())


def test_replicas_that_differ_fail_the_save(tmp_path: Path) -> None:
    """Stock stores one of them silently; with this planner the save raises and names the tensor."""
    results = run_ranks(2, save_different, str(tmp_path), failures=True)
    assert all(isinstance(result, RankRaised) for result in results)
    assert "tensor 'seed'" in results[0].message
    assert not (tmp_path / ".metadata").exists()


def save_sharded_tensors(rank: int, world_size: int, folder: str) -> None:
    """ShardedTensors, as FSDP1 has them."""
    warnings.simplefilter("ignore")

    def sharded(value: float) -> Any:
        shard = LocalShard.from_tensor_and_offsets(torch.full((2, 3), value), [2 * rank, 0], rank)
        return sharded_tensor.init_from_local_shards([shard], 2 * world_size, 3)

    stock.save({"s": sharded(rank + 1.0)}, checkpoint_id=folder, planner=DefaultSavePlanner())
    target = {"s": sharded(0.0)}
    stock.load(target, checkpoint_id=folder, planner=DefaultLoadPlanner())
    assert target["s"].local_shards()[0].tensor.unique().tolist() == [rank + 1.0]


def test_sharded_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    """The older ShardedTensor class goes through the same plans."""
    run_ranks(2, save_sharded_tensors, str(tmp_path))
