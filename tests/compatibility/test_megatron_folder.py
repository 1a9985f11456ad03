"""Folder layout of Megatron-LM's ``torch_dist``: stock DCP beside ``common.pt`` and ``metadata.json``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import dcp
from tests.command_line.cli_support import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save tensors with stock torch, other state with torch.save, and the name of the backend."""
    state = {
        "model.decoder.weight": torch.arange(12.0).reshape(3, 4),
        "optimizer.state.exp_avg": torch.ones(5),
    }
    stock_save(state, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
    torch.save({"iteration": 7, "args": {"hidden": 4}}, tmp_path / "iter_0000007" / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (tmp_path / "iter_0000007" / "metadata.json").write_text(json.dumps(backend))
    return tmp_path / "iter_0000007"


def test_a_megatron_folder_loads_and_converts(folder: Path, tmp_path: Path) -> None:
    """The folder loads and converts as the sharded checkpoint, and common.pt as a file of torch.save."""
    state = {"model.decoder.weight": torch.zeros(3, 4)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["model.decoder.weight"], torch.arange(12.0).reshape(3, 4))
    common = {"iteration": 0, "args": {"hidden": 0}}
    dcp.load(common, checkpoint_id=folder / "common.pt", no_dist=True)
    assert common == {"iteration": 7, "args": {"hidden": 4}}
    assert run("convert", folder, tmp_path / "model.pt", "--to", "torch", "--executor", "inline").status == 0
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {
        "model.decoder.weight",
        "optimizer.state.exp_avg",
    }


def test_a_megatron_folder_is_shown_and_verified(folder: Path) -> None:
    """show and verify work with the two other files in the folder."""
    assert "model.decoder.weight" in run("show", folder).out
    verified = run("verify", folder, "--json")
    assert {finding["kind"] for finding in verified.json[0]["findings"]} <= {"stray-file"}
