"""Options or managers that differ between ranks: an error at once."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.support.rank_acts import STATE, ObjectLoadPlanner, ObjectSavePlanner, outcome, warned
from tests.support.ranks import run_ranks

LOAD_OPTIONS: dict[str, tuple[Any, Any]] = {
    "only": (None, "w"),
    "exclude": ([f"layers.{n:03}" for n in range(100)], [f"layers.{n:03}" for n in range(101)]),
    "per_rank": ("exact", "keep"),
    "unexpected": ("error", "ignore"),
    "dtype": ("exact", "cast"),
    "allow_partial_load": (False, True),
    "weights_only": (True, False),
    "verify": ("blocks", "none"),
}


SAVE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "overwrite": (True, False),
    "torch_compatible": (True, False),
    "sync_files": (True, False),
    "single_file_per_rank": (True, False),
    "replica_check": ("sampled", "off"),
    "split_bytes": (1 << 20, None),
    "dedup_save_to_lowest_rank": (False, True),
}


def options_apart(rank: int, world_size: int, root: Path, way: str) -> Any:
    """Return for each option the outcome with another value on rank 1, and then with equal values."""
    dcp.save(STATE, checkpoint_id=root / "old")
    found: dict[str, Any] = {}

    def load(name: str, value: Any) -> None:
        planner = ObjectLoadPlanner() if way == "objects" else None
        dcp.load(
            {"w": torch.zeros(6), "step": 0},
            checkpoint_id=root / "old",
            planner=planner,
            timeout_seconds=120,
            **{name: value},
        )

    def save(name: str, value: Any) -> None:
        of_writer = {name: value} if name in signature(dcp.FileSystemWriter).parameters else {}
        cls = ObjectSavePlanner if way == "objects" else dcp.DefaultSavePlanner
        planner = cls(**({} if of_writer else {name: value}))
        writer = dcp.FileSystemWriter(root / "new" / name, **of_writer)
        if way == "async":
            dcp.async_save(STATE, storage_writer=writer, planner=planner).result(120)
        else:
            dcp.save(STATE, storage_writer=writer, planner=planner, timeout_seconds=120)

    for name, values in LOAD_OPTIONS.items() if way != "async" else ():
        found[name] = outcome(lambda: load(name, values[rank]))  # noqa: B023
    for name, values in SAVE_OPTIONS.items():
        found[name] = outcome(lambda: save(name, values[rank]))  # noqa: B023
    save("overwrite", True)
    load("only", ["w"] if rank == 0 else "w")
    return found, sorted(path.name for path in (root / "new").iterdir())


@pytest.mark.parametrize("way", ["columns", "objects", "async"])
def test_options_that_differ_by_rank_are_refused(tmp_path: Path, way: str) -> None:
    """All ranks raise an error with the option and the value of each rank, before any file is written. The
    group still works. A list of one pattern equals the pattern."""
    for found, left in run_ranks(2, options_apart, tmp_path, way):
        values = SAVE_OPTIONS if way == "async" else LOAD_OPTIONS | SAVE_OPTIONS
        assert found.keys() == values.keys()
        for name, (names, message, ranks) in found.items():
            assert "PlanError" in names and "RankFailedError" in names, (name, message)
            for rank, value in enumerate(values[name]):
                assert f"rank {rank}: {name}={value!r}"[:900] in message, message
            assert ranks == [1]
        assert left == ["overwrite"]


MANAGER_OPTIONS: dict[str, tuple[Any, Any]] = {
    "mode": ("thread", "sync"),
    "every_steps": (10, 20),
    "every_seconds": (None, 60.0),
    "save_first": (False, True),
    "when_busy": ("wait", "skip"),
    "on_failure": ("warn", "raise"),
    "retries": (2, 0),
    "handle_sigterm": (True, False),
    "agree_every_steps": (1, 2),
}


def _managers_apart(rank: int, world_size: int, root: Path) -> Any:
    found = {
        name: outcome(lambda: dcp.CheckpointManager(root, timeout_seconds=120, **{name: values[rank]}))  # noqa: B023
        for name, values in MANAGER_OPTIONS.items()
    }
    keep: Any = "all" if rank == 1 else None
    refused = outcome(lambda: dcp.CheckpointManager(root, timeout_seconds=120, keep=keep))
    with dcp.CheckpointManager(root, timeout_seconds=120) as manager:
        manager.save(1, STATE, last=True)
    return found, refused


def test_managers_that_differ_by_rank_are_refused(tmp_path: Path) -> None:
    """All ranks raise an error: their managers would save different steps, or wait alone. The group still
    works. The same holds for an option that is invalid on one rank."""
    for found, (refused, refusal, _) in run_ranks(2, _managers_apart, tmp_path / "run"):
        assert {"OptionError", "RankFailedError"} <= {*refused}, refusal
        assert "keep must be a Retention" in refusal
        for name, (names, message, _) in found.items():
            assert "PlanError" in names, (name, message)
            for rank, given in enumerate(MANAGER_OPTIONS[name]):
                value = "given" if name == "every_seconds" and given else given
                assert f"rank {rank}: {name}={value!r}"[:900] in message, message


def _metrics_apart(rank: int, world_size: int, root: Path) -> list[str]:
    with warned() as logged, dcp.CheckpointManager(root, timeout_seconds=120) as manager:
        for step in (1, 2):
            manager.save(step, STATE, metrics={"loss": rank / 4, "rate": 1.0}, force=True)
    return logged


def test_metrics_that_differ_by_rank_are_warned_of_once(tmp_path: Path) -> None:
    """The values of rank 0 are stored, and its log has the values of each rank."""
    (warning,), other = run_ranks(2, _metrics_apart, tmp_path)
    assert "metrics['loss']" in warning and "rank 0: 0.0; rank 1: 0.25" in warning and other == []
