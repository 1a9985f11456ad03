"""`dcp.state_dict`: get states of models and optimizers, save, load, and set them in new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import dcp
from dcp.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.support.parallel import RECIPES, Training
from tests.support.ranks import run_ranks
from tests.support.values import differences, fill, leaves, raw

SAVE = {"dcp": dcp.save, "stock": stock.save}
ROUTES = (("dcp", dcp.load), ("dcp", stock.load), ("stock", dcp.load))
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def state_of(training: Training, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return model and optimizer as one state."""
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    return {"model": model, "optimizer": optimizer}


def put_back(training: Training, state: dict[str, Any], options: StateDictOptions | None = None) -> None:
    """Set model and optimizer from one state."""
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )


def set_into_another(
    rank: int, world: int, root: str, name: str, flatten: bool, routes: list[int]
) -> list[str]:
    """Save a training, load into a new training, and return the differences."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    found = []
    for saver, load in (ROUTES[number] for number in routes):
        folder = f"{root}/{name}-{flatten}-{saver}-{load.__module__}"
        state = state_of(RECIPES[name][0](world), options)
        SAVE[saver](fill(state), checkpoint_id=folder)
        training = RECIPES[name][0](world)
        for parameter in training.model.parameters():
            parameter.data.zero_()
        target = state_of(training, options)
        load(target, checkpoint_id=folder)
        put_back(training, target, options)
        found += [f"{saver} {item}" for item in differences(state_of(training, options))]
    return found


WORLDS = {"fsdp1": 2, "fsdp2": 3, "ddp": 2, "tensor_parallel": 2, "fsdp2_tensor_parallel": 4}
WORLDS |= {"hybrid_sharded": 4, "frozen": 2}
SETTING = [
    # one of the routes each; test_parallel_models shows that all load the same
    ("fsdp1", 2, False, [0]),
    ("fsdp2", 3, True, [1]),
    ("fsdp2_tensor_parallel", 4, True, [2]),
    ("pipeline", 2, True, [0]),  # without flattening, groups of the stages collide
    *(
        pytest.param(name, world, flatten, [*range(len(ROUTES))], marks=pytest.mark.exhaustive)
        for flatten in (False, True)
        for name, world in (WORLDS | ({"pipeline": 2} if flatten else {})).items()
    ),
]


@pytest.mark.parametrize(("name", "world", "flatten", "routes"), SETTING)
def test_set_state_dict_restores_models_and_optimizers(
    name: str, world: int, flatten: bool, routes: list[int], tmp_path: Path
) -> None:
    """set_state_dict after load restores every parameter, buffer and optimizer tensor."""
    assert run_ranks(world, set_into_another, str(tmp_path), name, flatten, routes) == [[]] * world


def full_state(rank: int, world: int, root: str, name: str) -> list[str]:
    """Save a full, offloaded state dict on rank 0, broadcast it from rank 0, and return the differences."""
    training = RECIPES[name][0](world)
    put_back(training, fill(state_of(training)))
    full = state_of(training, FULL)
    found = [] if rank == 0 or not list(leaves(full["model"])) else [f"rank {rank} has a full state"]
    if rank == 0:
        found += [f"full {item}" for item in differences(full)]
        dcp.save(full, checkpoint_id=f"{root}/full", no_dist=True)
    dist.barrier()
    other = RECIPES[name][0](world)
    loaded = state_of(other, FULL)
    if rank == 0:
        for value in (value for _, value in leaves(loaded) if isinstance(value, torch.Tensor)):
            value.zero_()
        dcp.load(loaded, checkpoint_id=f"{root}/full", no_dist=True)
        if tuple(map(int, torch.__version__.split(".")[:2])) < (
            2,
            13,
        ):  # full tensors may be non-contiguous there, and torch broadcasts memory
            for _, value in leaves(loaded):
                if isinstance(value, torch.Tensor):
                    value.data = value.contiguous()
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # not set_state_dict: it skips a model with an empty state, and rank 0 would wait for ever
    set_model_state_dict(other.model, loaded["model"], options=broadcast)
    set_optimizer_state_dict(other.model, other.optimizer, loaded["optimizer"], options=broadcast)
    found += [f"set {item}" for item in differences(state_of(other))]
    # the full checkpoint also loads into the sharded state
    third = state_of(RECIPES[name][0](world))
    dcp.load(third, checkpoint_id=f"{root}/full")
    return found + [f"sharded {item}" for item in differences(third)]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("tensor_parallel", 2),
        pytest.param("fsdp2", 2, marks=pytest.mark.exhaustive),
        pytest.param("fsdp2_tensor_parallel", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_a_full_state_of_rank_0_loads_into_shards(name: str, world: int, tmp_path: Path) -> None:
    """full_state_dict and cpu_offload save, broadcast_from_rank0 sets, and sharded states load it."""
    assert run_ranks(world, full_state, str(tmp_path), name) == [[]] * world


def without_frozen(rank: int, world: int, root: str) -> list[Any]:
    """Save without frozen parameters; return the stored names, and results of strict and partial loads."""
    training = RECIPES["frozen"][0](world)
    trained_only = StateDictOptions(ignore_frozen_params=True)
    state = state_of(training, trained_only)
    dcp.save(fill(state), checkpoint_id=root)
    names = [name for name in dcp.open_index(root).fqns if name.startswith("model.")]
    other = RECIPES["frozen"][0](world)
    target = state_of(other, trained_only)
    dcp.load(target, checkpoint_id=root)
    put_back(other, target, StateDictOptions(ignore_frozen_params=True, strict=False))
    everything = state_of(other)
    before = {n: raw(v.to_local()) for n, v in everything["model"].items() if n.startswith("first")}
    try:
        dcp.load(everything, checkpoint_id=root)
        refused = False
    except dcp.MissingKeyError:
        refused = True
    report = dcp.load(everything, checkpoint_id=root, allow_partial_load=True)
    after = {n: raw(v.to_local()) for n, v in everything["model"].items() if n.startswith("first")}
    return [
        names,
        differences(state_of(other, trained_only)),
        refused,
        sorted(report.missing),
        before == after,
    ]


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    """With ignore_frozen_params no frozen parameter is stored; a strict load raises, and a partial load keeps
    and reports them."""
    for names, differing, refused, missing, kept in run_ranks(2, without_frozen, str(tmp_path)):
        assert not any("first" in name for name in names) and len(names) == 4
        assert (differing, refused, kept) == ([], True, True)
        assert missing == ["model.first.bias", "model.first.weight"]
