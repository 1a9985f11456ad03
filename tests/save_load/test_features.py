"""Features of saves and loads: without any one of them, everything else works as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from dcp.features import registry
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("number", range(len(registry.SAVE_FEATURES)))
def test_a_save_without_a_feature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """Tensors, tied tensors and values load; only the output of the feature is missing."""
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


def test_loads_without_a_feature(tmp_path: Path) -> None:
    """Shards and values load, and strict loads fail; an error in a feature is reported on all ranks."""
    state = {"model": {"w": torch.arange(12.0).reshape(4, 3), "row": torch.ones(3)}, "step": 3}
    dcp.save(state | {"part": {"lost": 1}}, checkpoint_id=tmp_path / "c", no_dist=True)
    errors = {feature.name: "UnexpectedKeyError" for feature in registry.LOAD_FEATURES}
    for outcome in run_ranks(2, load_without_each, str(tmp_path / "c")):
        failed = outcome.pop("fails")
        assert "feature 'fails', entries: ValueError: on rank 1" in failed
        assert outcome == errors | {"strictness": ""}


def test_a_misspelled_method_is_warned_of(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelled method of a feature would never be called, so a warning names it."""
    monkeypatch.setattr(registry, "_registered", [])
    odd = {"name": "odd", "manifst": print, "help": print}
    registry.register_feature(type("Odd", (registry.SaveFeature,), odd))
    assert caplog.messages == ["feature 'odd': no step calls manifst(). Did you mean 'manifest'?"]


class FailsInFindings(registry.LoadFeature):
    """A load feature whose findings raise an error."""

    name = "fails_in_findings"

    def findings(self, *, is_shared: bool) -> Any:
        """Raise."""
        raise ValueError("in findings")


def test_a_failing_feature_does_not_replace_the_error_of_missing_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Findings for the note on unexpected keys may fail: the error of missing keys is still raised."""
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    monkeypatch.setattr(registry, "LOAD_FEATURES", [*registry.LOAD_FEATURES, FailsInFindings])
    with pytest.raises(dcp.errors.CheckpointError, match="in findings"):
        dcp.load({"a": torch.zeros(2)}, checkpoint_id=tmp_path)
    with pytest.raises(dcp.errors.MissingKeyError, match="'b'"):
        dcp.load({"b": torch.zeros(2)}, checkpoint_id=tmp_path)


class Fails(registry.LoadFeature):
    """A load feature that raises a foreign error on one rank."""

    name = "fails"

    def entries(self, index: Any) -> None:
        """Raise on rank 1."""
        if self.call.rank == 1:
            raise ValueError("on rank 1")


def load_without_each(rank: int, world_size: int, place: str) -> dict[str, str]:
    """Load twice without each feature, and once with a failing one; return errors of the strict loads."""
    kinds, errors = registry.LOAD_FEATURES, dict[str, str]()
    mesh = init_device_mesh("cpu", (world_size,))
    gone: type[registry.LoadFeature]
    for gone in (*kinds, Fails):
        weight = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)])
        into: dict[str, Any] = {"model": {"w": weight, "row": torch.zeros(3)}, "step": 0, "part": {}}
        chosen = [*kinds, Fails] if gone is Fails else [kind for kind in kinds if kind is not gone]
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(registry, "LOAD_FEATURES", chosen)
                dcp.load(into, checkpoint_id=place, unexpected="ignore")
                assert torch.equal(weight.full_tensor(), torch.arange(12.0).reshape(4, 3))
                assert into["step"] == 3
                dcp.load(into, checkpoint_id=place)
            errors[gone.name] = ""
        except dcp.errors.CheckpointError as error:
            errors[gone.name] = str(error) if gone is Fails else type(error).__name__
    return errors
