"""Repeated saves by one writer, which reuses the plan: each equals a save by a new writer."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp
from dcp import PerRank
from dcp.errors import PlanError, ReplicaMismatchError, StorageError
from tests.support.ranks import run_ranks
from tests.support.values import leaves

_COLUMNS = ("dtype_codes", "requires_grad", "shape_start", "shape_values", "chunk_start")
_COLUMNS += ("chunk_offsets", "chunk_sizes", "payload_lengths", "crcs")  # type: ignore[assignment]


class Again:
    """Saves by one reused writer, each compared with a save by a new writer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer = dcp.FileSystemWriter(folder / "none", sync_files=False)
        self.saves = 0

    def save(self, state: dict[str, Any]) -> None:
        """Save by both writers, and compare the indexes."""
        self.saves += 1
        places = [self.folder / f"{self.saves}{side}" for side in ("again", "fresh")]
        self.writer.reset(places[0])
        for writer in (self.writer, dcp.FileSystemWriter(places[1], sync_files=False)):
            dcp.save(state, storage_writer=writer, no_dist=True)
        assert_same(*map(dcp.open_index, places))


def assert_same(one: Any, other: Any) -> None:
    """Compare names, dtypes, shapes, ties, checksums, values, paths and metadata."""
    for name in ("fqns", *_COLUMNS):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert ties(one) == ties(other)
    assert list(one.objects.fqns) == list(other.objects.fqns)
    assert [one.objects.values[row] for row in one.objects.plain] == [
        other.objects.values[row] for row in other.objects.plain
    ]
    assert dict(one.stride_orders) == dict(other.stride_orders)
    paths, expected = one.planner_data, other.planner_data
    assert (paths and list(paths.items())) == (expected and list(expected.items()))
    assert one.provenance.get("structure") == other.provenance.get("structure")


def ties(index: Any) -> list[int]:
    """Return for each chunk the first chunk with the same bytes."""
    places = index.payload_offsets.tolist()
    return [places.index(place) for place in places]


def training_state() -> dict[str, Any]:
    """Return a model, an optimizer and other values of a trainer."""
    weight = torch.nn.Parameter(torch.randn(4, 6))
    return {
        "model": OrderedDict(w=weight, tied=weight, b=torch.zeros(6), empty=torch.zeros(0, 3)),
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "m": torch.ones(4, 6).t()}},
            "groups": [{"lr": 0.1}],
        },
        "rng": PerRank({"cpu": torch.zeros(16, dtype=torch.uint8)}),
        "sizes": [1, 2, 3],
        "step": 7,
    }


Model = dict[str, Any]
CHANGES: dict[str, Callable[[Model, Model, Model], Any]] = {  # take a state, its model and its optimizer
    "shape in place": lambda _, model, optim: setattr(model["b"], "data", torch.zeros(7)),
    "strides in place": lambda _, model, optim: optim["state"][0]["m"].t_(),
    "dtype in place": lambda _, model, optim: setattr(model["b"], "data", model["b"].double()),
    "requires_grad in place": lambda _, model, optim: model["w"].requires_grad_(False),
    "resized in place": lambda _, model, optim: model["b"].resize_(3),
    "class": lambda _, model, optim: model.update(b=torch.nn.Parameter(torch.zeros(6))),
    "conjugated view": lambda _, model, optim: model.update(b=torch.ones(6, dtype=torch.complex64).conj()),
    "ties": lambda _, model, optim: model.update(tied=torch.nn.Parameter(model["w"].detach().clone())),
    "nesting with the same flat names": lambda state, model, _: state.update({"model.b": model.pop("b")}),
    "order": lambda state, model, _: state.update(model=OrderedDict(reversed(model.items()))),
    "a removed key": lambda _, model, optim: model.pop("b"),
    "an added key": lambda _, model, optim: model.update(c=torch.zeros(1)),
    "a key's type": lambda _, model, optim: optim.update(state={"0": optim["state"][0]}),
    "an equal key": lambda _, model, optim: optim.update(state={False: optim["state"][0]}),
    "a tensor becomes a value": lambda _, model, optim: model.update(b=0.0),
    "a value becomes a tensor": lambda state, model, _: state.update(step=torch.tensor(7)),
    "a list is opened": lambda state, model, _: state["sizes"].__setitem__(1, {"a": 1}),
    "a list is longer": lambda _, model, optim: optim["groups"].append({"lr": 0.2}),
    "no longer per rank": lambda state, model, _: state.update(rng=state["rng"].value),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_leads_to_a_new_plan(tmp_path: Path, change: str) -> None:
    """Any change of structure, in place or by a new object, leads to a new plan, also when it is undone. New
    values, memory or tensor objects do not."""
    job, state = Again(tmp_path), training_state()
    job.save(state)
    state["model"]["b"] = torch.full((6,), 5.0)
    job.save(state | {"step": 8})
    shallow = copy.copy(state) | {"model": copy.copy(state["model"]), "optim": copy.copy(state["optim"])}
    CHANGES[change](shallow, shallow["model"], shallow["optim"])
    job.save(shallow)
    job.save(shallow)
    job.save(training_state())


def test_a_kept_plan_holds_no_tensor(tmp_path: Path) -> None:
    """The kept plan holds no reference to a tensor."""
    job, tensor = Again(tmp_path), torch.zeros(3)
    gone = weakref.ref(tensor)
    job.save({"a": tensor})
    job.save({"a": tensor})
    del tensor
    gc.collect()
    assert gone() is None


# -- ranks ---------------------------------------------------------------------------------------------------


def state(rank: int, world_size: int, step: int) -> dict[str, Any]:
    """Return a trainer's state: shards, replicas on some or all ranks, ties, values, and `PerRank`."""
    rows, half = init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (world_size // 2, 2))
    base = torch.arange(8.0).view(2, 4) + 100 * step
    tied = torch.nn.Parameter(torch.full((5,), float(step)))
    return {
        "sharded": DTensor.from_local(base + rank, rows, [Shard(0)], run_check=False),
        "hybrid": DTensor.from_local(base + rank % 2, half, [Replicate(), Shard(0)], run_check=False),
        "plain": {f"layer{number}": torch.full((3,), float(step + number)) for number in range(50)},
        "tied": [tied, tied],
        "step": step,
        "mine": PerRank({"seed": rank + step, "rng": torch.full((2,), rank * step)}),
    }


def leaves_of(state: dict[str, Any]) -> list[Any]:
    """Return the leaves of a state, with lists for local tensors."""
    values = [value for _, value in leaves({**state, "mine": state["mine"].value})]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in local]


class _Flaky:
    """A `Stateful` that can fail."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise StorageError("the loader's position is lost")
        return {"position": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


def save_through_failures(rank: int, world_size: int, folder: str) -> list[str]:
    """Save by one writer: in the third save a replica differs, in the fifth a rank fails, and before the
    seventh and eighth one rank loses its plan."""
    seen, writer = [], dcp.FileSystemWriter(f"{folder}/0", sync_files=False)
    for step in range(1, 9):
        if (step, rank) in ((7, 2), (8, 0)):
            writer = dcp.FileSystemWriter(f"{folder}/0", sync_files=False)
        values = state(rank, world_size, step)
        if step == 3 and rank == 1:
            values["plain"]["layer17"][1] += 1
        writer.reset(f"{folder}/{step}")
        try:
            dcp.save({**values, "loader": _Flaky(step == 5 and rank == 1)}, storage_writer=writer)
        except dcp.RankFailedError as error:
            seen.append(f"{type(error).__name__}: {error}")
            continue
        target = state(rank, world_size, 99)
        dcp.load(target, checkpoint_id=f"{folder}/{step}")
        assert leaves_of(target) == leaves_of(state(rank, world_size, step))
        seen.append("saved")
    return seen


def test_saves_after_any_failure_are_right(tmp_path: Path) -> None:
    """With a kept plan a differing replica is still named; after any failure the next save is right."""
    for seen in run_ranks(4, save_through_failures, str(tmp_path)):
        assert [seen[number] for number in (0, 1, 3, 5, 6, 7)] == ["saved"] * 6
        assert "ReplicaMismatchError" in seen[2] and "plain.layer17" in seen[2]
        assert "the loader's position is lost" in seen[4] and "rank 1" in seen[4]
    assert not (tmp_path / "3" / "manifest.msgpack").exists()


class Position:
    """A class without __eq__."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def save_values(rank: int, world_size: int, folder: str) -> list[Any]:
    """Save values that differ by rank, a value that is equal on all ranks, and a value without state."""
    writer, seen = dcp.FileSystemWriter(f"{folder}/v", sync_files=False), []
    for lr in (0.1, 0.2, 0.3 + rank, {1.5, rank}, Position(rank), Position(2), Lock()):
        try:
            dcp.save({"lr": lr, "w": torch.zeros(3)}, storage_writer=writer)
            seen.append("saved")
        except ReplicaMismatchError as error:
            seen.append(str(error))
    return seen


def save_by_planner(folder: str, together: bool) -> Any:
    """Save without a writer by a reused planner with plan caching, and load."""
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for number in range(3):
        values = {"w": torch.full((4,), float(number)), "n": number}
        dcp.save(values, checkpoint_id=f"{folder}/{number}", planner=planner, use_collectives=together)
    target: dict[str, Any] = {"w": torch.zeros(4), "n": -1}
    dcp.load(target, checkpoint_id=f"{folder}/2")
    return target["n"], target["w"].tolist()


def save_dtensors(rank: int, world_size: int, folder: str) -> list[bool]:
    """Save DTensors that differ in one respect at a time; return whether the values load."""
    mesh, other = (init_device_mesh("cpu", (world_size, 1)) for _ in range(2))

    def kept(placement: Any, mesh: Any = mesh) -> dict[str, Any]:
        whole = DTensor.from_local(torch.ones(2, 2), mesh, [placement, Replicate()], run_check=False)
        few = distribute_tensor(torch.zeros(1, 2), mesh, [Shard(0), Replicate()], src_data_rank=None)
        return {"kept": whole, "few": few, "plain": torch.zeros(3), "step": 1}

    writer, seen = dcp.FileSystemWriter(f"{folder}/none", sync_files=False), []
    ways = [(Shard(0), mesh), (Shard(0), mesh), (Shard(1), mesh), (Replicate(), mesh), (Replicate(), other)]
    for number, (placement, now) in enumerate(ways):
        writer.reset(f"{folder}/d{number}")
        state = kept(placement, now)
        dcp.save(state, storage_writer=writer)
        target = {"kept": torch.zeros(state["kept"].shape), "plain": torch.ones(3)}
        dcp.load(target, checkpoint_id=f"{folder}/d{number}")
        seen.append(bool(target["kept"].all()) and not target["plain"].any())
    state = kept(Shard(0))
    writer.reset(f"{folder}/before")
    dcp.save(state, storage_writer=writer)
    state["kept"]._spec.placements = (Replicate(), Replicate())
    writer.reset(f"{folder}/after")
    with pytest.raises(PlanError, match="'kept'"):
        dcp.save(state, storage_writer=writer)
    return seen


def save_with_two_ranks(rank: int, world_size: int, folder: str) -> Any:
    """Save values, by a planner, and DTensors."""
    by_planner = [save_by_planner(f"{folder}/{together}", together) for together in (True, False)]
    return save_values(rank, world_size, folder), by_planner, save_dtensors(rank, world_size, folder)


def test_a_plan_of_two_ranks_is_kept_only_if_valid(tmp_path: Path) -> None:
    """Values of any class are compared between ranks, a planner may keep the plan, equal boxes on another
    mesh reuse it, and a DTensor spec that was changed in place is noticed."""
    for values, by_planner, dtensors in run_ranks(2, save_with_two_ranks, str(tmp_path)):
        assert [values[0], values[1], values[5]] == ["saved"] * 3
        assert all("object 'lr' differs" in text for text in values[2:5])
        assert "object 'lr' of ranks 0, 1 cannot be compared" in values[6]
        assert by_planner == [(2, [2.0] * 4)] * 2
        assert dtensors == [True] * 5
