"""Ranks that save on their own, without collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import CheckpointConflictError, CheckpointFormatError, ReplicaMismatchError
from tests.support.loaded import values
from tests.support.ranks import run_ranks


def save_alone_and_load(rank: int, world_size: int, path: str, saver: str) -> Any:
    """Save different data under equal names on each rank, and load."""
    state: dict[str, Any] = {"w": torch.full((5,), float(rank)), "o": rank}
    {"dcp": dcp.save, "stock": stock.save}[saver](state, checkpoint_id=path, use_collectives=False)
    wanted: dict[str, Any] = {"w": torch.zeros(5), "o": -1}
    dcp.load(wanted, checkpoint_id=path)
    return wanted["w"].tolist(), wanted["o"]


@pytest.mark.parametrize("saver", ["dcp", "stock"])
def test_a_rank_loads_its_own_save(tmp_path: Path, saver: str) -> None:
    """Each rank loads its own data, as with stock torch; a single process cannot choose between the ranks."""
    assert run_ranks(2, save_alone_and_load, str(tmp_path), saver) == [([r * 1.0] * 5, r) for r in (0, 1)]
    if saver == "dcp":
        with pytest.raises(ReplicaMismatchError):
            dcp.load({"w": torch.zeros(5)}, checkpoint_id=tmp_path)


def save_alone(rank: int, world_size: int, path: str) -> None:
    """Save on each rank without collectives."""
    dcp.save({f"w{rank}": torch.ones(2)}, checkpoint_id=path, use_collectives=False)


def test_parts_of_an_older_world_are_not_mixed_in(tmp_path: Path) -> None:
    """If 3 ranks and then 2 save to the same id, the third rank's part belongs to another checkpoint."""
    run_ranks(3, save_alone, str(tmp_path))
    run_ranks(2, save_alone, str(tmp_path))
    with pytest.raises(CheckpointFormatError, match="by 2 and by 3 ranks"):
        dcp.load({"w0": torch.zeros(2)}, checkpoint_id=tmp_path)


def test_saves_alone_over_a_common_checkpoint_are_refused(tmp_path: Path) -> None:
    """A save without collectives over a common checkpoint is refused: readers would load the old one."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointConflictError):
        dcp.save({"w": torch.zeros(4)}, checkpoint_id=tmp_path, use_collectives=False)
    assert values(tmp_path, w=torch.zeros(4)) == {"w": [1.0] * 4}
