"""A run with sync_files=False on a machine that loses power."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

import dcp
from dcp.filesystem import FileSystemWriter
from tests.support.power_cuts import Recording


def _save(root: Path, steps: range, *, sync_files: bool) -> None:
    writer = partial(FileSystemWriter, sync_files=sync_files)
    with dcp.CheckpointManager(
        root, mode="sync", no_dist=True, keep=dcp.Retention(last=1), writer=writer, handle_sigterm=False
    ) as manager:
        for step in steps:
            manager.save(step, {"w": torch.full((100,), step)}, force=True)
            manager.wait()


def _restored(root: Path) -> int | None:
    state = {"w": torch.zeros(100, dtype=torch.int64)}
    with dcp.CheckpointManager(root, mode="sync", no_dist=True, handle_sigterm=False) as manager:
        restored = manager.restore(state)
    if restored is None:
        return None
    assert set(state["w"].tolist()) == {restored.step}
    return restored.step


def test_a_power_cut_always_leaves_a_durable_step(tmp_path: Path) -> None:
    """With retention of one unsynced step, a step with its own values loads after a power cut at any time,
    whatever unsynced data is lost."""
    root = tmp_path / "run"
    _save(root, range(1, 2), sync_files=True)
    with Recording(root) as recording:
        _save(root, range(2, 4), sync_files=False)
    assert _restored(root) == 3
    images = [
        (point, make)
        for point, make in recording.images()
        if "all that" in point or ("alone" in point and ("unlink" in point or "rmdir" in point))
    ]
    assert len(images) > 5
    for point, make in images:
        make(root)
        assert _restored(root) is not None, point
