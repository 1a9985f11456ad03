"""A save that fails late: what is committed stays, and every rank hears of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.ranks.collectives import Ranks
from dcp.storage.commit import Names, discard
from dcp.storage.stores import open_store
from dcp.storage.torch_storage.writer import FileSystemWriter
from tests.support.crashes import wait_for_end
from tests.support.loaded import Unpicklable, values
from tests.support.ranks import RankDied, RankRaised, run_ranks


def lose_rank_after_commit(rank: int, world_size: int, path: str) -> Any:
    """Rank 1 is killed after it told where its bytes are; rank 0 commits and cannot tell anybody."""
    broadcast = Ranks._broadcast
    pids: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(pids, os.getpid())

    def late(self: Any, data: bytes | None) -> bytes:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_end(pids[1])
        return broadcast(self, data)

    Ranks._broadcast = late  # type: ignore[method-assign]
    try:
        dcp.save({"w": torch.ones(1000)}, checkpoint_id=path, timeout_seconds=120)
    except dcp.CheckpointError as error:
        return error.facts.get("committed"), " ".join(error.__notes__)
    finally:
        Ranks._broadcast = broadcast  # type: ignore[method-assign]


def test_a_rank_lost_after_the_commit_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    """The save raises, and says that its checkpoint is committed; it loads."""
    results = run_ranks(2, lose_rank_after_commit, str(tmp_path), failures=True)
    assert isinstance(results[1], RankDied)
    committed, note = results[0]
    assert committed
    assert "is committed" in note
    assert values(tmp_path, w=torch.zeros(1000)) == {"w": [1.0] * 1000}


def test_discarding_spares_files_of_the_published_manifest(tmp_path: Path) -> None:
    """Also where the manifest cannot be read, because then nobody knows."""
    writer = FileSystemWriter(tmp_path)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer)
    save_id = writer.index.provenance["save_id"] if writer.index else ""
    (tmp_path / f"__7_0.{save_id}.distcp").write_bytes(b"")
    store = open_store(tmp_path)
    discard(store, save_id, Names())
    assert [file.name for file in tmp_path.glob("*.distcp")] == [f"__0_0.{save_id}.distcp"]
    (tmp_path / "manifest.msgpack").write_bytes(b"damaged")
    discard(store, save_id, Names())
    assert len(list(tmp_path.glob("*.distcp"))) == 1


class FailsOnRankOne:
    """A Stateful whose state cannot be had on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        """Out of memory on rank 1."""
        if self.rank == 1:
            raise MemoryError("no memory for the state")
        return {"a": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not called in a load that fails."""
        raise AssertionError


class ShortPlanner(stock.DefaultSavePlanner):
    """Forgets a rank in its global plan."""

    def create_global_plan(self, all_plans: Any) -> Any:
        """The first rank's plan only."""
        plans, metadata = super().create_global_plan(all_plans)
        return plans[:1], metadata


def fail_somehow(rank: int, world_size: int, path: str, how: str) -> None:
    """One rank, or the coordinator, fails where it is easy to leave the others waiting."""
    bounds: dict[str, Any] = {"checkpoint_id": path, "timeout_seconds": 120}
    if how == "state_dict in save":
        dcp.save({"s": FailsOnRankOne(rank)}, **bounds)
    elif how == "state_dict in load":
        dcp.save({"s": {"a": torch.ones(3)}}, **bounds)
        dcp.load({"s": FailsOnRankOne(rank)}, **bounds)
    elif how == "short plan":
        dcp.save({"w": torch.ones(3)}, planner=ShortPlanner(), **bounds)
    else:
        dcp.save({"w": torch.ones(3), "o": dcp.PerRank(Unpicklable() if rank else 1)}, **bounds)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("state_dict in save", "no memory for the state"),
        ("state_dict in load", "no memory for the state"),
        ("short plan", "1 parts for 2 ranks"),
        ("message that is not UTF-8", "name"),
    ],
)
def test_every_rank_hears_of_a_failure_at_once(tmp_path: Path, how: str, expected: str) -> None:
    """The others do not wait until their timeout, and learn the cause."""
    for result in run_ranks(2, fail_somehow, str(tmp_path), how, failures=True):
        assert isinstance(result, RankRaised)
        assert expected in result.message
        assert result.seconds < 100


class Elsewhere(stock.FileSystemWriter):
    """A storage whose place only it knows."""

    @property
    def checkpoint_id(self) -> str:
        """Nothing that can be opened."""
        return "elsewhere://"


def save_elsewhere(rank: int, world_size: int, path: str) -> Any:
    """The metadata that each rank gets."""
    return sorted(dcp.save({"w": torch.ones(3)}, storage_writer=Elsewhere(path)).state_dict_metadata)


def test_every_rank_gets_the_metadata_of_a_foreign_storage(tmp_path: Path) -> None:
    """As from stock: not only the coordinator, and without opening the storage."""
    assert run_ranks(2, save_elsewhere, str(tmp_path)) == [["w"], ["w"]]
