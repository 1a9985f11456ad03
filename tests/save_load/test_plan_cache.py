"""Saves of one writer, of which the later go by the plan of the first: what that must not hide."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp
from dcp.errors import ReplicaMismatchError, StorageError
from tests.support.ranks import run_ranks


def state(rank: int, world_size: int, step: int) -> dict[str, Any]:
    """What a trainer has at a step: shards, replicas of some ranks and of all, ties, values, and its own."""
    rows, half = init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (world_size // 2, 2))
    base = torch.arange(8.0).view(2, 4) + 100 * step
    tied = torch.nn.Parameter(torch.full((5,), float(step)))
    return {
        "sharded": DTensor.from_local(base + rank, rows, [Shard(0)], run_check=False),
        "hybrid": DTensor.from_local(base + rank % 2, half, [Replicate(), Shard(0)], run_check=False),
        "plain": {f"layer{number}": torch.full((3,), float(step + number)) for number in range(50)},
        "tied": [tied, tied],
        "step": step,
        "lr": 0.1 / step,
        "mine": dcp.PerRank({"seed": rank + step, "rng": torch.full((2,), rank * step)}),
    }


def assert_holds(rank: int, world_size: int, folder: str, step: int) -> None:
    """A checkpoint has the state of a step on every rank."""
    target, expected = state(rank, world_size, 99), state(rank, world_size, step)
    dcp.load(target, checkpoint_id=folder)
    for name in ("sharded", "hybrid"):
        assert torch.equal(target[name].to_local(), expected[name].to_local()), name
    assert all(torch.equal(target["plain"][key], expected["plain"][key]) for key in expected["plain"])
    assert torch.equal(target["tied"][1], expected["tied"][1])
    assert torch.equal(target["mine"].value["rng"], expected["mine"].value["rng"])
    values = target["step"], target["lr"], target["mine"].value["seed"]
    assert values == (expected["step"], expected["lr"], expected["mine"].value["seed"])


class Flaky:
    """Cannot say on one rank, at one save, what its state is."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        """Or not."""
        if self.fails:
            raise StorageError("the loader's position is lost")
        return {"position": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not called."""
        raise AssertionError


def save_through_failures(rank: int, world_size: int, folder: str) -> list[str]:
    """Six saves of one writer: one has a replica that differs, one a rank that fails."""
    writer = dcp.FileSystemWriter(f"{folder}/0", sync_files=False)
    seen = []
    for step in range(1, 7):
        values = {**state(rank, world_size, step), "loader": Flaky(step == 5 and rank == 1)}
        if step == 3 and rank == 1:
            values["plain"]["layer17"][1] += 1
        writer.reset(f"{folder}/{step}")
        try:
            dcp.save(values, storage_writer=writer)
        except dcp.RankFailedError as error:
            seen.append(f"{type(error).__name__}: {error}")
            continue
        assert_holds(rank, world_size, f"{folder}/{step}", step)
        seen.append("saved")
    return seen


def test_every_save_holds_its_own_step_whatever_failed_before(tmp_path: Path) -> None:
    """A replica that differs is named also where the plan is known, and after any failure on one rank
    the next save is right."""
    for seen in run_ranks(4, save_through_failures, str(tmp_path)):
        assert [seen[number] for number in (0, 1, 3, 5)] == ["saved"] * 4
        assert "ReplicaMismatchError" in seen[2] and "plain.layer17" in seen[2]
        assert "the loader's position is lost" in seen[4] and "rank 1" in seen[4]
    assert not (tmp_path / "3" / "manifest.msgpack").exists()


class Position:
    """Of a class that says nothing of equality."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def save_object_mismatch(rank: int, world_size: int, folder: str) -> list[Any]:
    """Values that differ, plain data first; then one that is equal on all ranks, and one without state."""
    writer, seen = dcp.FileSystemWriter(folder, sync_files=False), []
    for lr in (0.1, 0.2, 0.3 + rank, {1.5, rank}, Position(rank), Position(2), Lock()):
        try:
            dcp.save({"lr": lr, "w": torch.zeros(3)}, storage_writer=writer)
            seen.append("saved")
        except ReplicaMismatchError as error:
            seen.append(str(error))
    return seen


def test_a_value_that_differs_is_named_whatever_its_class(tmp_path: Path) -> None:
    """Values are compared where the plan is known as where it is not."""
    for seen in run_ranks(2, save_object_mismatch, str(tmp_path)):
        assert [seen[0], seen[1], seen[5]] == ["saved"] * 3
        assert all("object 'lr' differs" in text for text in seen[2:5])
        assert "object 'lr' of ranks 0, 1 cannot be compared" in seen[6]


def save_in_turns(rank: int, world_size: int, folder: str) -> None:
    """Two writers with states of different structures, in turns; rank 1 makes one of them anew."""
    writers = {name: dcp.FileSystemWriter(f"{folder}/{name}", sync_files=False) for name in "ab"}
    for number in range(4):
        if number == 2 and rank == 1:  # it has no plan any more, and the others have one
            writers["b"] = dcp.FileSystemWriter(f"{folder}/b", sync_files=False)
        small = {"w": torch.full((4,), float(number)), "n": number}
        large = {"other": {**small}, "more": torch.full((2, 2), float(number))}
        for name, values in (("a", small), ("b", large)):
            dcp.save(values, storage_writer=writers[name])
        target: dict[str, Any] = {"other": {"w": torch.zeros(4), "n": -1}, "more": torch.zeros(2, 2)}
        dcp.load(target, checkpoint_id=f"{folder}/b")
        assert target["other"]["n"] == number
        assert target["other"]["w"].tolist() == [number] * 4
        assert target["more"].tolist() == [[number] * 2] * 2


def test_two_writers_do_not_influence_each_other(tmp_path: Path) -> None:
    """Saves in turns, also where one rank has forgotten the plan, have the values of their moment."""
    run_ranks(2, save_in_turns, str(tmp_path))


def save_by_planner(rank: int, world_size: int, folder: str, together: bool) -> Any:
    """A planner with plan caching and no writer, which is used again."""
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for number in range(3):
        values = {"w": torch.full((4,), float(number)), "n": number}
        dcp.save(values, checkpoint_id=f"{folder}/{number}", planner=planner, use_collectives=together)
    target: dict[str, Any] = {"w": torch.zeros(4), "n": -1}
    dcp.load(target, checkpoint_id=f"{folder}/2")
    return target["n"], target["w"].tolist()


@pytest.mark.parametrize("together", [True, False])
def test_a_planner_can_own_the_plan(together: bool, tmp_path: Path) -> None:
    """With and without collectives each save has its own values."""
    assert run_ranks(2, save_by_planner, str(tmp_path), together) == [(2, [2.0] * 4)] * 2
