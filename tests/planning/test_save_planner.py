"""DefaultSavePlanner: in stock torch's save, subclassed as torch documents, and as columns."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import default_planner as stock_planner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp.planners.per_rank import PerRank
from dcp.planners.save.planner import DefaultSavePlanner, uses_columns
from dcp.storage.errors import PlanError, ReplicaMismatchError

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


def test_stock_saves_with_it_and_loads_it(tmp_path: Path) -> None:
    """torch.distributed.checkpoint.save takes the planner, and torch's own load gives everything back."""
    stock.save(state(), checkpoint_id=tmp_path, planner=DefaultSavePlanner())
    loaded = empty_state()
    stock.load(loaded, checkpoint_id=tmp_path)
    assert_loaded(loaded)


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


def test_it_is_torchs_planner_for_isinstance() -> None:
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


class RenamePlanner(DefaultSavePlanner):
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


def test_the_renaming_planner_of_the_documentation(tmp_path: Path) -> None:
    """Keys are stored renamed; the planner keeps the columnar path, since only the set-up is overridden."""
    stock.save({"w": torch.ones(2), "n": 1}, checkpoint_id=tmp_path, planner=RenamePlanner())
    loaded: dict[str, Any] = {"foo_w": torch.zeros(2), "foo_n": 0}
    stock.load(loaded, checkpoint_id=tmp_path)
    assert loaded["foo_w"].tolist() == [1, 1]
    assert loaded["foo_n"] == 1
    assert uses_columns(RenamePlanner())


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


@pytest.mark.parametrize(
    "planner",
    [FP16Planner(), DDPLoadBalancingPlanner(), SaveExtraDataPlanner()],
    ids=lambda p: type(p).__name__,
)
def test_overridden_steps_turn_columns_off(planner: DefaultSavePlanner) -> None:
    """A planner that changes a step which columns skip gets torch's objects; so does a patched instance."""
    assert not uses_columns(planner)
    patched = DefaultSavePlanner()
    assert uses_columns(patched)
    setattr(patched, "resolve_data", lambda item: torch.zeros(1))  # noqa: B010 - what users do
    assert not uses_columns(patched)
    assert not uses_columns(stock_planner.DefaultSavePlanner())


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


def test_replicas_that_differ_are_found_in_torchs_protocol_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests travel with the items of torch's plans; state that differs on purpose is PerRank."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ReplicaMismatchError, match=r"'rng'.*PerRank"):
        planned([{"rng": torch.tensor([rank]), "w": torch.zeros(2)} for rank in range(2)])
    planned([{"rng": torch.tensor([rank])} for rank in range(2)], replica_check="off")
    _, _, metadata = planned([{"rng": PerRank(torch.tensor([rank]))} for rank in range(2)])
    assert list(metadata.state_dict_metadata) == ["rng.rank-0", "rng.rank-1"]


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


def test_uneven_strided_shards_are_stored_where_they_belong(fake_ranks: Any) -> None:
    """FSDP2 over tensor parallelism with an uneven dimension: torch's planner stores it wrong, this one
    right."""
    whole = torch.arange(9 * 2).reshape(9, 2)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    stored = torch.full_like(whole, -1)
    plans, planners = [], []
    for rank in range(4):
        fake_ranks(rank, 4)
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False)
        planner = DefaultSavePlanner()
        planner.set_up_planner({"w": distribute_tensor(whole, mesh, placements, src_data_rank=None)})
        plans.append(planner.create_local_plan())
        planners.append(planner)
    for rank, plan in enumerate(planners[0].create_global_plan(plans)[0]):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            region = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            planners[rank].finish_plan(plan)
            stored[region] = planners[rank].resolve_data(item)
    assert torch.equal(stored, whole)


def test_columns_carry_digests_only_for_what_others_may_hold(fake_ranks: Any) -> None:
    """Plain tensors and replicated DTensors are digested, shards of one holder are not."""
    fake_ranks(0, 4)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False)
    planner = DefaultSavePlanner()
    planner.set_up_planner(
        {
            "plain": torch.ones(4),
            "sharded": distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)], src_data_rank=None),
            "hybrid": distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)], src_data_rank=None),
            "lr": 0.1,
            "class": object,
        }
    )
    local = planner.create_local_columns()
    columns = local.columns
    assert [digest != 0 for digest in columns.item_digests.tolist()] == [True, False, True]
    assert columns.item_sharded.tolist() == [0, 1, 1]
    assert columns.objects.digests.all()
    assert local.objects == [0.1, object]
    assert [tuple(source.shape) for source in local.sources] == [(4,), (1,), (2,)]
    alone = planner.create_local_columns(digests=False).columns
    assert not alone.item_digests.any()
    assert not alone.objects.digests.any()


def test_tied_weights_are_recognised() -> None:
    """One memory under two names is a tie, a view of another shape or a part of it is not."""
    weight = torch.nn.Parameter(torch.ones(4, 2))
    planner = DefaultSavePlanner()
    planner.set_up_planner(
        {
            "embed": weight,
            "head": weight,
            "alias": weight.detach(),
            "flat": weight.view(-1),
            "copy": weight.clone(),
        }
    )
    assert planner.create_local_columns().columns.item_ties.tolist() == [0, 0, 0, -1, -1]


def test_lookup_says_what_is_not_there() -> None:
    """Names and boxes that this rank does not have are typed errors."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.zeros(4), "n": 1})
    for index in (MetadataIndex("gone"), MetadataIndex("w", [2]), MetadataIndex("n", [0])):
        with pytest.raises(PlanError, match=repr(index.fqn)):
            planner.lookup_object(index)
    assert planner.lookup_object(MetadataIndex("n")) == 1
    assert planner.lookup_object(MetadataIndex("w")).shape == (4,)


def test_values_put_into_the_state_dict_later_are_the_ones_resolved() -> None:
    """resolve_data looks at the state dict as it is then: staging may have replaced tensors."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.zeros(2)})
    item = planner.finish_plan(planner.create_local_plan()).items[0]
    assert planner.resolve_data(item).tolist() == [0, 0]
    planner.state_dict["w"] = torch.ones(2)
    assert planner.resolve_data(item).tolist() == [1, 1]
