"""Loads without a state dict: torch's ``_load_state_dict_from_keys`` and ``_EmptyStateDictLoadPlanner``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.default_planner import _EmptyStateDictLoadPlanner
from dcp.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

PACKAGES: dict[str, Any] = {"ours": dcp, "stock": stock}


def a_state() -> dict[str, Any]:
    """Nested tensors and values."""
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)},
        "optimizer": {"state": [{"step": torch.tensor(3.0)}], "lr": 0.5},
        "step": 7,
    }


def flat(state: dict[str, Any]) -> list[str]:
    """Its values as text, by name."""
    found = torch.distributed.checkpoint._nested_dict.flatten_state_dict(state)[0]
    return sorted(f"{name}={value}" for name, value in found.items())


@pytest.mark.parametrize("package", PACKAGES)
def test_the_whole_checkpoint_or_parts_of_it(package: str, tmp_path: Path) -> None:
    """Without keys all of it, with one or a set what is at or below them, as torch's function has it."""
    PACKAGES[package].save(a_state(), checkpoint_id=tmp_path, no_dist=True)
    assert flat(_load_state_dict_from_keys(checkpoint_id=tmp_path)) == flat(a_state())
    for keys in ("model", {"step", "optimizer"}, {"model.weight", "optimizer.lr"}, "step"):
        own = _load_state_dict_from_keys(keys, checkpoint_id=tmp_path)
        reader = stock.FileSystemReader(tmp_path)
        theirs = stock.state_dict_loader._load_state_dict_from_keys(keys, storage_reader=reader)
        assert flat(own) == flat(theirs)
        assert 0 < len(flat(own)) < len(flat(a_state()))


def test_absent_keys_and_filled_dicts_are_errors(tmp_path: Path) -> None:
    """Where torch's function gives an empty dict, and its planner fails an assertion."""
    dcp.save(a_state(), checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.MissingKeyError, match="'modle'"):
        _load_state_dict_from_keys({"modle", "step"}, checkpoint_id=tmp_path)
    reader, planner = dcp.FileSystemReader(tmp_path), _EmptyStateDictLoadPlanner()
    with pytest.raises(dcp.errors.PlanError, match="empty dict"):
        _load_state_dict({"step": 1}, reader, no_dist=True, planner=planner)


@pytest.mark.parametrize("planners", PACKAGES)
def test_planners_of_either_package_fill_an_empty_dict(planners: str, tmp_path: Path) -> None:
    """The two calls that tools which merge checkpoints make."""
    dcp.save(a_state(), checkpoint_id=tmp_path, no_dist=True)
    for package in PACKAGES.values():
        state: dict[str, Any] = {}
        package.state_dict_loader._load_state_dict(
            state,
            storage_reader=package.FileSystemReader(tmp_path),
            planner=PACKAGES[planners].default_planner._EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
        assert flat(state) == flat(a_state())


def test_no_pickle_is_run(tmp_path: Path) -> None:
    """A value of a class of one's own is refused, where torch's planner builds it."""
    stock.save({"path": _Own()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.errors.UnsafeObjectError):
        _load_state_dict_from_keys(checkpoint_id=tmp_path)


class _Own:
    pass
