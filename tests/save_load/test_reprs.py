"""The repr of results: a few lines for a checkpoint of any size."""

from __future__ import annotations

from pathlib import Path

import torch

import dcp

TENSORS = 300


def test_results_have_a_short_repr(tmp_path: Path) -> None:
    """The results of a save, a partial load and a conversion have a short repr, and hold all entries."""
    state = {f"layer.{n}": torch.zeros(2) for n in range(TENSORS)}
    saved = dcp.save({**state, "step": 1}, checkpoint_id=tmp_path / "dcp")
    assert repr(saved) == "<metadata of 300 tensors and 1 objects>"
    assert len(saved.state_dict_metadata) == TENSORS + 1
    loaded = dcp.load({"layer.0": torch.zeros(2)}, checkpoint_id=tmp_path / "dcp")
    assert len(loaded.unexpected) == TENSORS
    assert len(repr(loaded)) < 1500
    assert "bytes_needed=8," in repr(loaded)
    converted = dcp.convert(tmp_path / "dcp", tmp_path / "w.safetensors", to="safetensors", drop_objects=True)
    assert len(converted.checksums) == TENSORS
    assert len(repr(converted)) < 1500
