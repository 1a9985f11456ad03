"""Ranks that call different operations, or use different checkpoints: an error at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from tests.support.rank_acts import STATE, ObjectLoadPlanner, ObjectSavePlanner, outcome
from tests.support.ranks import run_ranks

_RARE = pytest.mark.exhaustive


def load_different_ids(rank: int, world_size: int, root: Path, kind: str) -> Any:
    """Load one checkpoint on ranks 0 and 2; on rank 1 load another, or request no entry of it."""
    save = dcp.save
    if kind == "stock":
        save = torch.distributed.checkpoint.save
    for name in ("one", "other", "copy"):
        value = 1.0 if name == "other" else 0.0
        if kind != "stock" or rank == 0:
            save(
                {"w": torch.full((64,), value), "step": 1}, checkpoint_id=root / name, no_dist=kind == "stock"
            )
        dist.barrier()
    state: dict[str, Any] = {"w": torch.full((64,), -1.0)}
    if kind == "reads nothing" and rank == 1:
        state = {}
    planner = ObjectLoadPlanner() if kind == "objects" else None
    name = "other" if rank == 1 else "one"
    found = outcome(lambda: dcp.load(state, checkpoint_id=root / name, planner=planner, timeout_seconds=120))
    dcp.load({"w": torch.zeros(64)}, checkpoint_id=root / "one", timeout_seconds=120)
    return found, [float(value) for value in set(state.get("w", torch.zeros(0)).tolist())]


@pytest.mark.parametrize("kind", ["columns", "reads nothing", "stock", pytest.param("objects", marks=_RARE)])
def test_loads_of_different_ids_are_refused(tmp_path: Path, kind: str) -> None:
    """The error has both ids, and the group still works. No rank reads the files of another rank's
    checkpoint, even if their names are equal."""
    for (names, message, _), values in run_ranks(3, load_different_ids, tmp_path, kind):
        assert "PlanError" in names, message
        assert "rank 0, 2:" in message and str(tmp_path / "one") in message
        assert "rank 1:" in message and str(tmp_path / "other") in message
        assert values in ([-1.0], [])


def save_different_ids(rank: int, world_size: int, root: Path, kind: str) -> Any:
    """Save to one id on ranks 0 and 2, to another on rank 1; rank 1 or rank 0 may have nothing to write."""
    state: dict[str, Any] = dict(STATE)
    if kind == "writes":
        state["own"] = dcp.PerRank(torch.full((4,), float(rank)))
    if kind == "rank 1 alone writes":
        state = {"own": dcp.PerRank(torch.ones(4))} if rank == 1 else {}
    name = "other" if rank == 1 else "one"
    if kind == "over old ones":
        if rank != 2:
            dcp.save({"w": torch.full((6,), -1.0)}, checkpoint_id=root / name, no_dist=True)
        dist.barrier()
    planner = ObjectSavePlanner() if kind == "objects" else None

    def act() -> None:
        if kind == "thread":
            dcp.async_save(state, checkpoint_id=root / name).result(120)
        else:
            dcp.save(state, checkpoint_id=root / name, planner=planner, timeout_seconds=120)

    found = outcome(act)
    dist.barrier()
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    if kind == "over old ones":
        old = {"w": torch.zeros(6)}
        dcp.load(old, checkpoint_id=root / name, no_dist=True)
        left = [] if old["w"].tolist() == [-1.0] * 6 and len(left) == 8 else left
    dcp.save(STATE, checkpoint_id=root / "one", timeout_seconds=120)
    return found, left


@pytest.mark.parametrize(
    "kind",
    ["rank 1 alone writes", "thread", "over old ones"]
    + [pytest.param(kind, marks=_RARE) for kind in ("one rank writes nothing", "writes", "objects")],
)
def test_saves_to_different_ids_are_refused(tmp_path: Path, kind: str) -> None:
    """The error has both ids, also if a rank writes no file. The old checkpoint stays, the group works."""
    for (names, message, _), left in run_ranks(3, save_different_ids, tmp_path, kind):
        assert "PlanError" in names, message
        assert "rank 0, 2:" in message and str(tmp_path / "one") in message
        assert "rank 1:" in message and str(tmp_path / "other") in message
        assert left == []


def use_by_other_names(rank: int, world_size: int, root: Path) -> Any:
    """Save and load with another path to the folder on each rank; rank 1 has nothing to write."""
    if rank == 0:
        (root / "real").mkdir()
    dist.barrier()
    (root / f"name-{rank}").symlink_to(root / "real")
    for _ in range(2):
        dcp.save(STATE, checkpoint_id=root / f"name-{rank}" / "step-1")
    state: dict[str, Any] = {"w": torch.zeros(6), "step": 0}
    dcp.load(state, checkpoint_id=root / f"name-{rank}" / "step-1")
    return state["w"].tolist(), state["step"], len(list((root / "real" / "step-1").iterdir()))


def test_ranks_may_use_different_paths(tmp_path: Path) -> None:
    """Ranks may use different paths to the same storage, as with mounts that differ between hosts."""
    assert run_ranks(2, use_by_other_names, tmp_path) == [([0.0, 1, 2, 3, 4, 5], 3, 3)] * 2


def _different_operations(rank: int, world_size: int, root: Path, other: str) -> Any:
    target = root / "new"
    dcp.save(STATE, checkpoint_id=root / "old")

    def act() -> None:
        if rank == 0:
            dcp.save(STATE, checkpoint_id=target)
        elif other == "load":
            dcp.load({"w": torch.zeros(6)}, checkpoint_id=root / "old")
        elif other == "make a manager":
            dcp.CheckpointManager(root / "run")
        elif other == "save alone":
            dcp.save(STATE, checkpoint_id=target, use_collectives=False)
        elif other == "fail":
            dcp.save(STATE)

    found = outcome(act)
    dcp.save(STATE, checkpoint_id=target)
    return found


@pytest.mark.parametrize("other", ["load", "make a manager", "save alone", "fail"])
def test_ranks_in_different_operations_fail_at_once(tmp_path: Path, other: str) -> None:
    """The error names the operations, long before the timeout of 1800 s, and the next operation works."""
    words = {
        "load": ("rank 1: load ", "must call the same function"),
        "make a manager": ("rank 1: CheckpointManager", "must call the same function"),
        "save alone": ("without collectives", "the same options"),
        "fail": ("rank 1", "checkpoint_id"),
    }[other]
    for names, message, _ in run_ranks(2, _different_operations, tmp_path, other):
        assert "RankFailedError" in names, message
        assert all(word in message for word in words), message
