"""Hints of the error for a path without a checkpoint: checkpoints below, beside and in the path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dcp


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two runs with steps, one step without a commit, and a file of weights."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("a/step-2", "a/step-10", "a/step-9", "b/step-1"):
        dcp.save({"n": 1}, checkpoint_id=root / name, no_dist=True)
    (root / "a/step-11").mkdir()
    (root / "a/step-11/__0_0.00000000.distcp").write_bytes(b"")
    (root / "files").mkdir()
    torch.save({"n": 1}, root / "files/model.pt")
    return root


def message_for(place: Path) -> str:
    """Return the message of the error of `dcp.open_index`."""
    with pytest.raises(dcp.CheckpointNotFoundError) as caught:
        dcp.open_index(place)
    assert caught.value.path
    return str(caught.value)


def test_the_error_lists_steps_below_a_run(runs: Path) -> None:
    """Committed steps below are listed, the newest first."""
    assert f"{runs}/a holds no checkpoint: " in message_for(runs / "a")
    assert message_for(runs / "a").endswith("\nCheckpoints below it: step-10, step-9, step-2.")
    assert "\nFolders below it: files, b, a" in message_for(runs)


def test_the_error_lists_names_beside_a_missing_path(runs: Path) -> None:
    """Similar names beside a missing path are listed, or else all names of the nearest existing folder."""
    assert message_for(runs / "b/step-7") == (
        f"{runs}/b/step-7 holds no checkpoint: it does not exist.\n{runs}/b has step-1."
    )
    assert f"{runs}/c does not exist.\n{runs} has " in message_for(runs / "c/step-1")
    assert f"{runs} has files" in message_for(runs / "fils")
