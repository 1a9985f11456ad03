"""Planners and storages of dcp, torch and users, in `save` and `load` of dcp and of torch.

The users' classes are those of torch's documentation, and a storage written from the interface alone.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp
from tests.support.ranks import run_ranks
from tests.support.user_storage import ItemReader, ItemWriter, PlainLoadPlanner, PlainSavePlanner
from tests.support.values import differences, fill, scrub

PACKAGES: dict[str, Any] = {"dcp": dcp, "stock": stock}
State = dict[str, Any]
Way = tuple[str, str, str]
"""Package of engine, planner and storage."""
ALL: list[Way] = list(product(PACKAGES, PACKAGES, PACKAGES))
PAIRS: list[Way] = [way for way in ALL if way.count("stock") % 2 == 0]
"""Subset in which any two of the three positions have all four combinations."""


def _save(way: Way, folder: str, state: State, planner: Any = None) -> None:
    engine, base, storage = (PACKAGES[name] for name in way)
    planner = base.DefaultSavePlanner() if planner is None else planner
    engine.save(state, storage_writer=storage.FileSystemWriter(folder), planner=planner)


def misread(way: Way, folder: str, target: State, planner: Any = None, **values: Any) -> list[str]:
    """Load into ``target`` with the parts of ``way``. Return the differences, also of ``values``."""
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
    """Save and load with each combination of engine, planner and storage. Return the differences."""
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
    """Each of eight combinations saves, and each of eight loads equal bytes and values."""
    assert run_ranks(world, every_save, str(tmp_path), ways) == [[]] * world


# -- the planners of torch's documentation ----------------------------------------------------------------


def _flat_state(world: int) -> State:
    mesh = init_device_mesh("cpu", (world,))
    return {
        "rows": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(0)]),
        "plain": torch.zeros(3),
        "other": torch.zeros(2, 2),
        "lr": 0.5,
    }


def _plain_tensors() -> State:
    return {"rows": torch.zeros(7, 6), "plain": torch.zeros(3), "other": torch.zeros(2, 2)}


# -- storages and planners written from the interface alone -----------------------------------------------


def own_parts(rank: int, world: int, root: str) -> list[str]:
    """Use a user's storage with each package's planner, and a user's planners with each package's storage."""
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
        # torch's helpers repeat replicated tensors in each rank's plan; stock's own planner removes the
        # repetitions
        sharded = {"rows": _flat_state(world)["rows"]} | ({"lr": 0.5} if rank == 0 else {})
        _save((engine, engine, storage), folder, fill(sharded), PlainSavePlanner())
        for load_engine, load_storage in product(PACKAGES, repeat=2):
            target = scrub({"rows": _flat_state(world)["rows"], "lr": 0.0})
            way = (load_engine, load_engine, load_storage)
            wrong += misread(way, folder, target, PlainLoadPlanner(), lr=0.5)
    return wrong


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_minimal_storages_and_planners_work(world: int, tmp_path: Path) -> None:
    """A storage that pickles each item, and planners without defaults, work with both packages."""
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
def test_overridden_planner_steps_are_called(package: str, tmp_path: Path) -> None:
    """A single overridden step of either package's planner is called, and its result is saved or loaded."""
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


class _WithoutY(dcp.DefaultLoadPlanner):
    """Planner that leaves out an entry after torch's set_up_planner."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {name: value for name, value in self.state_dict.items() if name != "y"}


class _ByProtocol(_WithoutY):
    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return super().lookup_tensor(index)


@pytest.mark.parametrize("kind", [_WithoutY, _ByProtocol])
def test_entries_that_a_planner_leaves_out_are_unchanged(kind: Any, tmp_path: Path) -> None:
    """With both load paths an entry that a planner leaves out is unchanged, and tied entries are loaded."""
    weight = torch.arange(6.0)
    dcp.save({"w": weight, "tied": weight, "y": weight}, checkpoint_id=tmp_path, no_dist=True)
    own, y = torch.zeros(6), torch.zeros(6)
    planner = kind(unexpected="ignore")
    dcp.load({"w": own, "tied": own, "y": y}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert torch.equal(own, weight) and not y.any()
