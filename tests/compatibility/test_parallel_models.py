"""Models and optimizers under each parallelism, between dcp, stock torch and other world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as stock

import dcp
from dcp.state_dict import StateDictOptions, get_state_dict
from tests.support.parallel import RECIPES, Training, pipeline
from tests.support.ranks import RankRaised, run_ranks
from tests.support.values import differences, fill, scrub

SAVE = {"dcp": dcp.save, "stock": stock.save}
LOAD = {"dcp": dcp.load, "stock": stock.load}
OWN_NAMES = ("pipeline", "frozen", "data_parallel")
"""Recipes with other names of entries than the rest."""
STOCK_CANNOT = ("fsdp1-8",)
"""Cases of checkpoints that stock cannot load itself: FSDP1 with ranks without rows."""

Found = dict[str, list[str]]


def _state_of(training: Training, name: str = "") -> dict[str, Any]:
    # parameter groups list all their names, which differ between pipeline stages
    options = StateDictOptions(flatten_optimizer_state_dict=name == "pipeline")
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    return {"model": model, "optimizer": optimizer}


def _recipes(world: int, *, without: tuple[str, ...] = ()) -> list[str]:
    return [
        name
        for name, (_, worlds) in RECIPES.items()
        if (world in worlds or world > 4) and name not in without
    ]


def _save_all(rank: int, world: int, root: str, sources: list[tuple[str, str]]) -> None:
    for name, saver in sources:
        _save_one(RECIPES[name][0](world), f"{root}/{name}-{world}", name, [saver])


def _save_one(training: Training, path: str, name: str, savers: list[str]) -> None:
    for saver in savers:
        SAVE[saver](fill(_state_of(training, name)), checkpoint_id=f"{path}-{saver}")


def load_all(
    rank: int, world: int, root: str, names: list[str], sources: list[str], loaders: list[str]
) -> Found:
    """Load each folder of ``sources`` into each recipe's zeroed state. Return the differences by case."""
    found: Found = {}
    for name in names:
        training = RECIPES[name][0](world)
        for source in sources:
            found |= _load_one(training, root, f"{name}-{world}", source, loaders)
    return found


def _load_one(training: Training, root: str, case: str, source: str, loaders: list[str]) -> Found:
    found: Found = {}
    for loader in loaders:
        target = scrub(_state_of(training, case.partition("-")[0]))
        assert differences(target)
        LOAD[loader](target, checkpoint_id=f"{root}/{source}")
        found[f"{source} into {case} by {loader}"] = differences(target)
    return found


def same_topology(rank: int, world: int, root: str, names: list[str]) -> Found:
    """Save by dcp and stock. Load dcp's by both and stock's by dcp. Return the differences."""
    found: Found = {}
    for name in names:
        training, case = RECIPES[name][0](world), f"{name}-{world}"
        _save_one(training, f"{root}/{case}", name, ["dcp", "stock"])
        loaders = ["dcp"] if case in STOCK_CANNOT else ["dcp", "stock"]
        found |= _load_one(training, root, case, f"{case}-dcp", loaders)
        found |= _load_one(training, root, case, f"{case}-stock", ["dcp"])
    return found


def _assert_none_differ(results: list[Found], cases: int) -> None:
    for rank, found in enumerate(results):
        assert len(found) == cases
        assert {case: names for case, names in found.items() if names} == {}, f"on rank {rank}"


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 3, 4, 8))])
def test_every_parallelism_round_trips_with_stock(world: int, tmp_path: Path) -> None:
    """Model and optimizer of each recipe are equal: dcp's loaded by dcp and stock, stock's loaded by dcp."""
    names = _recipes(world)
    cases = sum(2 if f"{name}-{world}" in STOCK_CANNOT else 3 for name in names)
    _assert_none_differ(run_ranks(world, same_topology, str(tmp_path), names), cases)


SOURCES = [
    (name, world, saver)
    for turn, saver in enumerate(SAVE)
    for world in (1, 2, 3, 4)
    for name in _recipes(world, without=OWN_NAMES)[(world + turn) % 2 :: 2]
]
"""Sources: each saver saves every second recipe of each world of 1 to 4 ranks, alternating between worlds."""

TARGETS = {
    1: ["plain", "fsdp2"],
    2: ["fsdp1", "fsdp2_tensor_parallel"],
    3: ["fsdp2", "tensor_parallel"],
    4: ["fsdp1_hybrid", "fsdp2_tensor_parallel"],
}


@pytest.mark.parametrize("world", [2, 3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 4))])
def test_every_parallelism_loads_into_every_other(tmp_path: Path, world: int) -> None:
    """A checkpoint of any parallelism and world size, of dcp or stock, loads into any other."""
    taken = [SOURCES[(2 * world + number) % 8 :: 8] for number in (0, 1)]  # all sources, over all worlds
    for ranks in (1, 2, 3, 4):
        sources = [(name, saver) for name, of, saver in taken[0] + taken[1] if of == ranks]
        run_ranks(ranks, _save_all, str(tmp_path), sources)
    for target, made in zip(TARGETS[world], taken, strict=True):
        folders = [f"{name}-{of}-{saver}" for name, of, saver in made]
        results = run_ranks(world, load_all, str(tmp_path), [target], folders, ["dcp"])
        _assert_none_differ(results, cases=len(folders))


def _save_pipeline_by_groups(rank: int, world: int, root: str) -> None:
    training = pipeline(world)
    dcp.save(_state_of(training), checkpoint_id=root)


def test_parameter_groups_of_pipeline_stages_are_refused(tmp_path: Path) -> None:
    """Without flatten_optimizer_state_dict stock keeps one stage's group and drops the other; dcp raises."""
    results = run_ranks(2, _save_pipeline_by_groups, str(tmp_path / "x"), failures=True)
    for result in results:
        assert isinstance(result, RankRaised)
        assert result.type_name == "ReplicaMismatchError"
        assert "optimizer.param_groups.0.params" in result.message
