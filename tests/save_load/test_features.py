"""Features of saves stand beside the steps: without each of them, all else is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.features import registry


@pytest.mark.parametrize("number", range(len(registry.SAVE_FEATURES)))
def test_a_save_without_a_feature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """Tensors, tied ones among them, and values come back; only what the feature does is missing."""
    kept = [feature for at, feature in enumerate(registry.SAVE_FEATURES) if at != number]
    monkeypatch.setattr(registry, "SAVE_FEATURES", kept)
    weight = torch.arange(12.0).reshape(3, 4)
    state: dict[str, Any] = {
        "model": {"w": weight, "tied": weight, "row": weight[1]},
        "optim": {"state": {"m": weight + 1}},
    }
    writer = dcp.FileSystemWriter(tmp_path / "c", digests=True)
    dcp.save(state | {"step": 3}, storage_writer=writer, apart="optimizer", no_dist=True)
    into: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "step": 0,
    }
    dcp.load(into, checkpoint_id=tmp_path / "c", no_dist=True, unexpected="ignore")
    assert into["step"] == 3
    assert all(torch.equal(into["model"][name], value) for name, value in state["model"].items())
    index, gone = dcp.open_index(tmp_path / "c"), registry.SAVE_FEATURES
    names = {feature.name for feature in gone}
    assert (len(index.files) > 1, any(index.digests)) == ("parts" in names, "digests" in names)
