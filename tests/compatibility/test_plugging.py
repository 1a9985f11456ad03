"""Planners and storages of ours, of torch and of users, in `_save` and `load` of ours and of torch.

The users' classes are those of torch's documentation, and a storage written from the interface alone.
"""

from __future__ import annotations

import dataclasses
import io
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp
from tests.support.ranks import run_ranks
from tests.support.user_storage import ItemReader, ItemWriter, PlainLoadPlanner, PlainSavePlanner
from tests.support.values import differences, fill, scrub

PACKAGES: dict[str, Any] = {"ours": dcp, "stock": stock}
State = dict[str, Any]
Way = tuple[str, str, str]
"""Whose engine, planner and storage."""
ALL: list[Way] = list(product(PACKAGES, PACKAGES, PACKAGES))
PAIRS: list[Way] = [way for way in ALL if way.count("stock") % 2 == 0]
"""In which any two of the three come together in each of the four ways."""


def _save(way: Way, folder: str, state: State, planner: Any = None) -> None:
    engine, base, storage = (PACKAGES[name] for name in way)
    planner = base.DefaultSavePlanner() if planner is None else planner
    engine.save(state, storage_writer=storage.FileSystemWriter(folder), planner=planner)


def misread(way: Way, folder: str, target: State, planner: Any = None, **values: Any) -> list[str]:
    """Load likewise into ``target``; what differs, and the values that are others."""
    engine, base, storage = (PACKAGES[name] for name in way)
    planner = base.DefaultLoadPlanner() if planner is None else planner
    engine.load(target, storage_reader=storage.FileSystemReader(folder), planner=planner)
    wrong = differences(target) + [name for name, value in values.items() if target[name] != value]
    return [f"{folder} by {'-'.join(way)}: {wrong}"] if wrong else []


def _state_of(world: int) -> State:
    mesh = init_device_mesh("cpu", (world,))
    return {
        "model": {
            "rows": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.zeros(5, 9), mesh, [Shard(1)]),
            "copy": distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()]),
            "plain": torch.zeros(3),
            "scalar": torch.zeros((), dtype=torch.int64),
        },
        "optimizer": {0: {"step": torch.zeros(1)}},
        "lr": 0.25,
        "betas": (0.9, 0.99),
    }


# -- every combination ------------------------------------------------------------------------------------


def every_save(rank: int, world: int, root: str, ways: list[Way]) -> list[str]:
    """Each of save, planner and storage from either package; then loaded by each likewise; what differs."""
    found = []
    for way in ways:
        folder = f"{root}/{'-'.join(way)}"
        _save(way, folder, fill(_state_of(world)))
        for load_way in ways:
            target = scrub(_state_of(world)) | {"lr": None, "betas": None}
            found += misread(load_way, folder, target, lr=0.25, betas=(0.9, 0.99))
    return found


@pytest.mark.parametrize(
    ("world", "ways"),
    [(1, ALL), (3, PAIRS), *(pytest.param(world, ALL, marks=pytest.mark.exhaustive) for world in (2, 3))],
)
def test_engines_planners_and_storages_combine_freely(world: int, ways: list[Way], tmp_path: Path) -> None:
    """Eight ways to save times eight to load, of ours and stock's parts: equal bytes and values in all."""
    assert run_ranks(world, every_save, str(tmp_path), ways) == [[]] * world


def planner_options(rank: int, world: int, root: str, ways: list[Way]) -> list[str]:
    """Options of the default planners, of each package with the other's engine and storage; what is wrong."""
    wrong: list[str] = []
    options: dict[str, dict[str, Any]] = {
        "nested": {"flatten_state_dict": False, "flatten_sharded_tensors": False},
        "lowest": {"dedup_save_to_lowest_rank": True},
        "cached": {"enable_plan_caching": True},
    }
    for way, name in product(ways, options):
        engine, base, storage = way
        planner = PACKAGES[base].DefaultSavePlanner(**options[name])
        for cache in (c for n, c in vars(SavePlanner).items() if n.startswith("_cached_")):
            cache.clear()  # torch's planners of a process share them, by class name: whatever the storage
        # the later saves of one planner may use what it kept of the first
        for number in (0, 1, 1) if name == "cached" or ways == ALL else (0,):
            folder = f"{root}/{'-'.join(way)}-{name}-{number}"
            _save(way, folder, fill(_flat_state(world)), planner)
            for load_base, load_storage in (("ours", "stock"), ("stock", "ours")):
                # flatten_sharded_tensors alone makes torch's planner load values into a copy of the state
                as_saved = options[name] if name == "nested" else {}
                loader, target = PACKAGES[load_base].DefaultLoadPlanner(**as_saved), scrub(_flat_state(world))
                target["lr"] = None
                wrong += misread((engine, load_base, load_storage), folder, target, loader, lr=0.5)
        absent, target = torch.full((2,), 7.0), scrub(_flat_state(world)) | {"lr": None}
        reader, partial = PACKAGES[storage].FileSystemReader(folder), PACKAGES[base].DefaultLoadPlanner
        PACKAGES[engine].load(
            target | {"absent": absent}, storage_reader=reader, planner=partial(allow_partial_load=True)
        )
        wrong += [f"{folder} partial {item}" for item in differences(target)]
        wrong += [f"{folder} absent changed"] if not absent.eq(7).all() else []
    return wrong


@pytest.mark.parametrize("ways", [PAIRS, pytest.param(ALL, marks=pytest.mark.exhaustive)])
def test_options_of_the_default_planners_mean_the_same(ways: list[Way], tmp_path: Path) -> None:
    """Not flattened, deduplicated to the lowest rank, plans cached, partial: on every engine and storage."""
    assert run_ranks(2, planner_options, str(tmp_path), ways) == [[], []]


# -- the planners of torch's documentation ----------------------------------------------------------------


def save_planners(base: type[Any]) -> dict[str, type[Any]]:
    """The save planners of torch's documentation, on the default planner of either package."""

    class RenamePlanner(base):  # type: ignore[misc]
        def set_up_planner(
            self, state_dict: State, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
        ) -> None:
            super().set_up_planner(
                {"foo_" + k: v for k, v in state_dict.items()}, storage_meta, is_coordinator
            )

    class FP16Planner(base):  # type: ignore[misc]
        def create_local_plan(self) -> SavePlan:
            plan: SavePlan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            item = super().resolve_data(write_item)
            return item if write_item.type == WriteItemType.BYTE_IO else item.to(torch.float16)

    class DDPLoadBalancingPlanner(base):  # type: ignore[misc]
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            items = all_plans[0].items
            plans = [
                dataclasses.replace(plan, items=items[rank :: len(all_plans)])
                for rank, plan in enumerate(all_plans)
            ]
            planned: tuple[list[SavePlan], Metadata] = super().create_global_plan(plans)
            return planned

    class SaveExtraDataPlanner(base):  # type: ignore[misc]
        def create_local_plan(self) -> SavePlan:
            plan: SavePlan = super().create_local_plan()
            return dataclasses.replace(plan, planner_data="per-rank-data")

        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            global_plan, metadata = super().create_global_plan(all_plans)
            merged = [plan.planner_data for plan in global_plan]
            return global_plan, dataclasses.replace(metadata, planner_data=merged)

    return {
        c.__name__: c for c in (RenamePlanner, FP16Planner, DDPLoadBalancingPlanner, SaveExtraDataPlanner)
    }


def _load_planners(base: type[Any]) -> dict[str, type[Any]]:
    class RenamePlanner(base):  # type: ignore[misc]
        def set_up_planner(
            self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False
        ) -> None:
            self.original_state_dict = state_dict
            state_dict = {"foo_" + k: v for k, v in state_dict.items()}
            if self.flatten_sharded_tensors:
                from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors

                state_dict = _flatten_sharded_tensors(state_dict)
            if self.flatten_state_dict:
                from torch.distributed.checkpoint._nested_dict import flatten_state_dict

                state_dict, self.mappings = flatten_state_dict(state_dict)
            self.state_dict = state_dict
            self.metadata = metadata
            self.is_coordinator = is_coordinator

        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            # the documentation's own, with the prefix cut off
            self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)

    class MetaModelMaterialize(base):  # type: ignore[misc]
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            tensor = super().resolve_tensor(read_item)
            return torch.empty_like(tensor, device="cpu")

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            self.state_dict[read_item.dest_index.fqn] = tensor

    return {planner.__name__: planner for planner in (RenamePlanner, MetaModelMaterialize)}


def _flat_state(world: int) -> State:
    mesh = init_device_mesh("cpu", (world,))
    return {
        "rows": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(0)]),
        "plain": torch.zeros(3),
        "other": torch.zeros(2, 2),
        "lr": 0.5,
    }


def documented_planners(rank: int, world: int, root: str, ways: list[Way]) -> list[str]:
    """The documentation's planners, on the bases, engines and storages of both packages; what is wrong."""
    wrong: list[str] = []
    for way in ways:
        engine, base, storage = way
        case = f"{root}/{'-'.join(way)}"
        savers = save_planners(PACKAGES[base].DefaultSavePlanner)
        loaders = _load_planners(PACKAGES[base].DefaultLoadPlanner)
        for name, planner in savers.items():
            # balancing is for replicas; and torch's planner, when it merges its own planner_data for nested
            # dicts, fails on that of its documentation
            state = fill(_plain_tensors() if name == "DDPLoadBalancingPlanner" else _flat_state(world))
            nested = name != "SaveExtraDataPlanner" or base == "ours"
            _save(way, f"{case}-{name}", state, planner(flatten_state_dict=nested))
        target = scrub(_flat_state(world)) | {"lr": 0.0}
        wrong += misread(way, f"{case}-RenamePlanner", target, loaders["RenamePlanner"](), lr=0.5)
        half = {
            name: torch.zeros_like(value, dtype=torch.float16) for name, value in _plain_tensors().items()
        }
        misread((engine, engine, storage), f"{case}-FP16Planner", half)
        wrong += [
            f"{case} half {name}"
            for name, value in fill(_plain_tensors()).items()
            if not torch.equal(half[name].nan_to_num(), value.to(torch.float16).nan_to_num())
        ]
        for name in ("DDPLoadBalancingPlanner", "SaveExtraDataPlanner"):
            wrong += misread((engine, engine, storage), f"{case}-{name}", scrub(_plain_tensors()))
        extra = stock.FileSystemReader(f"{case}-SaveExtraDataPlanner").read_metadata().planner_data
        wrong += [f"{case} planner_data is {extra}"] if extra != ["per-rank-data"] * world else []
        meta: State = {"plain": torch.zeros(3, device="meta"), "other": torch.zeros(2, 2, device="meta")}
        materialise = loaders["MetaModelMaterialize"]()
        reader = PACKAGES[storage].FileSystemReader(f"{case}-SaveExtraDataPlanner")
        PACKAGES[engine].load(meta, storage_reader=reader, planner=materialise)
        wrong += [f"{case} materialised {name}" for name in differences(dict(materialise.state_dict))]
    return wrong


def _plain_tensors() -> State:
    return {"rows": torch.zeros(7, 6), "plain": torch.zeros(3), "other": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("world", "ways"), [(1, ALL), (2, PAIRS), pytest.param(2, ALL, marks=pytest.mark.exhaustive)]
)
def test_planners_of_torchs_documentation_work(world: int, ways: list[Way], tmp_path: Path) -> None:
    """Renaming, storing fp16, balancing, extra data and materialising: on either base, engine and storage."""
    assert run_ranks(world, documented_planners, str(tmp_path), ways) == [[]] * world


# -- storages and planners written from the interface alone -----------------------------------------------


def own_parts(rank: int, world: int, root: str) -> list[str]:
    """A user's storage with each package's planner, a user's planners with each package's storage."""
    wrong: list[str] = []
    for engine, planner in product(PACKAGES.values(), repeat=2):
        folder = f"{root}/items-{engine.__name__}-{planner.__name__}"
        writer = ItemWriter(folder)
        engine.save(fill(_state_of(world)), storage_writer=writer, planner=planner.DefaultSavePlanner())
        order = ["set_up", "local", *(["global"] if rank == 0 else []), "write"]
        wrong += [f"{folder}: {writer.calls}"] if writer.calls[: len(order)] != order else []
        wrong += [f"{folder}: no finish"] if ("finish" in writer.calls) != (rank == 0) else []
        for loader, loads in product(PACKAGES.values(), repeat=2):
            target = scrub(_state_of(world)) | {"lr": None}
            loader.load(target, storage_reader=ItemReader(folder), planner=loads.DefaultLoadPlanner())
            wrong += [f"{folder} {name}" for name in differences(target)]
            wrong += [f"{folder} lr"] if target["lr"] != 0.25 else []
    for engine, storage in product(PACKAGES, repeat=2):
        folder = f"{root}/plain-{engine}-{storage}"
        # torch's helpers repeat replicated tensors in every rank's plan, which stock's own planner removes
        sharded = {"rows": _flat_state(world)["rows"]} | ({"lr": 0.5} if rank == 0 else {})
        _save((engine, engine, storage), folder, fill(sharded), PlainSavePlanner())
        for load_engine, load_storage in product(PACKAGES, repeat=2):
            target = scrub({"rows": _flat_state(world)["rows"], "lr": 0.0})
            way = (load_engine, load_engine, load_storage)
            wrong += misread(way, folder, target, PlainLoadPlanner(), lr=0.5)
    return wrong


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_parts_written_from_the_interface_alone_work(world: int, tmp_path: Path) -> None:
    """A storage that pickles each item, and planners without any default, with the parts of both packages."""
    assert run_ranks(world, own_parts, str(tmp_path)) == [[]] * world


# -- each step alone ----------------------------------------------------------------------------------------

SAVE_STEPS = [
    *("create_local_plan", "create_global_plan", "finish_plan"),
    *("resolve_data", "lookup_object", "transform_object"),
]
LOAD_STEPS = [
    *("create_local_plan", "create_global_plan", "finish_plan", "load_bytes"),
    *("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor"),
]


def _counting(base: type[Any], step: str) -> tuple[Any, list[str]]:
    calls: list[str] = []

    def counted(self: Any, *args: Any) -> Any:
        calls.append(step)
        return getattr(base, step)(self, *args)

    return type("Counting", (base,), {step: counted})(), calls


@pytest.mark.parametrize("package", PACKAGES)
def test_each_step_that_a_planner_overrides_is_called(package: str, tmp_path: Path) -> None:
    """Alone, on a planner of either package: what it returns is what is saved and loaded."""
    for step in SAVE_STEPS:
        planner, calls = _counting(PACKAGES[package].DefaultSavePlanner, step)
        state = fill(_plain_tensors()) | {"lr": 0.5}
        dcp.save(state, checkpoint_id=tmp_path / step, planner=planner, no_dist=True)
        assert calls, step
        assert differences(dcp.read(tmp_path / step)) == [], step
    for step in LOAD_STEPS:
        planner, calls = _counting(PACKAGES[package].DefaultLoadPlanner, step)
        target = scrub(_plain_tensors()) | {"lr": 0.0}
        dcp.load(target, checkpoint_id=tmp_path / SAVE_STEPS[0], planner=planner, no_dist=True)
        assert calls, step
        assert (differences(target), target["lr"]) == ([], 0.5), step


# -- writers as stagers -------------------------------------------------------------------------------------


class CountingWriter(dcp.FileSystemWriter):
    """Stages by torch's copy, counts, and keeps the copy as torch's cache does, which pins memory for it."""

    staged = 0

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy."""
        type(self).staged += 1
        self.state_dict_cache = super().stage(state_dict)
        return self.state_dict_cache


def _loaded(folder: Path, like: torch.Tensor) -> torch.Tensor:
    state = {"w": torch.zeros_like(like)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["w"]


def test_writers_are_stagers_as_torchs_are(tmp_path: Path) -> None:
    """The class and the protocol are torch's, and a copy is one that later changes do not reach."""
    for made in (dcp.FileSystemWriter(tmp_path), dcp.FsspecWriter(str(tmp_path))):
        assert isinstance(made, AsyncStager)
        assert isinstance(made, BlockingAsyncStager)
        assert made.should_synchronize_after_execute is False
        w = torch.ones(3)
        staged = made.stage({"w": w})
        w.zero_()
        assert staged["w"].tolist() == [1, 1, 1]
        made.close()
    assert dcp.FileSystemWriter(tmp_path, cache_staged_state_dict=True).cache_staged_state_dict


@pytest.mark.parametrize(
    "kind",
    [
        dcp.AsyncCheckpointerType.THREAD,
        pytest.param(dcp.AsyncCheckpointerType.PROCESS, marks=pytest.mark.exhaustive),
    ],
)
def test_a_subclass_that_stages_is_the_stager_of_its_saves(
    kind: dcp.AsyncCheckpointerType, tmp_path: Path
) -> None:
    """Its ``stage`` is called once a save, before the call returns, for threads and processes."""
    w = torch.arange(5.0)
    CountingWriter.staged = 0
    for number in range(2):
        writer = CountingWriter(tmp_path / str(number))
        future = dcp.async_save({"w": w}, storage_writer=writer, async_checkpointer_type=kind, no_dist=True)
        w.add_(1)
        future.result(240)
        assert _loaded(tmp_path / str(number), w).tolist() == [number + i for i in range(5)]
    assert CountingWriter.staged == 2
    given: Any = {"async_stager": BlockingAsyncStager(), "no_dist": True}  # is the caller's word
    dcp.async_save({"w": w}, storage_writer=CountingWriter(tmp_path / "given"), **given).result(240)
    assert CountingWriter.staged == 2 and _loaded(tmp_path / "given", w).equal(w)


def test_stocks_async_save_stages_by_our_writer(tmp_path: Path) -> None:
    """As by its own: the state may change when it returns."""
    w = torch.arange(5.0)
    future = stock.async_save({"w": w}, storage_writer=CountingWriter(tmp_path), no_dist=True)
    w.zero_()
    assert isinstance(future, Future)
    future.result(240)
    assert _loaded(tmp_path, w).tolist() == [0, 1, 2, 3, 4]
