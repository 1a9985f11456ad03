import random
from pathlib import Path

import numpy as np
import torch

import dcp
from dcp.integrations.random_state import RandomState
from tests.support.ranks import run_ranks


def draw() -> tuple[float, float, float]:
    """One number of each generator."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_all_generators_go_on_where_they_were(tmp_path: Path) -> None:
    """Saved and loaded, Python's, numpy's and torch's draw again what they drew after the save."""
    dcp.save({"random": RandomState()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    drawn = draw()
    dcp.load({"random": RandomState()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert draw() == drawn


def save_and_draw(rank: int, world_size: int, checkpoint: str) -> tuple[float, float, float]:
    """A rank with generators of its own saves them."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    dcp.save({"random": RandomState()}, checkpoint_id=checkpoint)
    return draw()


def load_and_draw(rank: int, world_size: int, checkpoint: str) -> tuple[float, float, float]:
    """A rank of a later run."""
    dcp.load({"random": RandomState()}, checkpoint_id=checkpoint)
    return draw()


def test_each_rank_gets_its_own_and_another_number_of_ranks_keeps_what_it_has(tmp_path: Path) -> None:
    """Two ranks draw on as two ranks did; one rank alone draws as if nothing had been loaded."""
    checkpoint = str(tmp_path / "checkpoint")
    drawn = run_ranks(2, save_and_draw, checkpoint)
    assert drawn[0] != drawn[1]
    assert run_ranks(2, load_and_draw, checkpoint) == drawn

    before = RandomState().state_dict()
    expected = draw()
    RandomState().load_state_dict(before)
    report = dcp.load({"random": RandomState()}, checkpoint_id=checkpoint, no_dist=True)
    assert draw() == expected and report.rescaled == ["random.generators"]
