"""From any format to any other and back to torch.save: all of a state dict survives every way around."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dcp
from dcp.conversion.run import convert
from dcp.storage.errors import CorruptCheckpointError, PlanError
from tests.support.conversion import assert_same, training_state

_NAMES = {"dcp": "checkpoint", "torch": "model.pt", "safetensors": "model.safetensors"}
_WAYS = [way for length in (1, 2) for way in itertools.product(_NAMES, repeat=length)]


def _state() -> dict[str, Any]:
    state = training_state()
    state["kinds"]["view"] = state["kinds"]["large"][3:90, 5:60].t()
    state["kinds"]["expanded"] = torch.arange(4.0).expand(3, 4)
    state["pair"] = (torch.ones(2), {"inner": torch.zeros(1)}, 5)
    state["layers"] = [torch.full((2,), 1.0), {"deep": [torch.full((1,), 2.0)]}]
    state["nothing"] = {}
    state["size"] = torch.Size((3, 4))
    state["model"]._metadata = OrderedDict({"": {"version": 1}})
    return state


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch.save file with int keys, tuples, lists, views, an OrderedDict with metadata, an empty dict."""
    path = tmp_path_factory.mktemp("original") / "model.pt"
    torch.save(_state(), path)
    return path


@pytest.mark.parametrize("way", _WAYS, ids="-".join)
def test_all_of_a_torch_file_comes_back(way: tuple[str, ...], original: Path, tmp_path: Path) -> None:
    """Types of containers and keys, order, values, bytes, ties and requires_grad."""
    source = original
    for number, to in enumerate(way):
        target = tmp_path / str(number) / _NAMES[to]
        convert(source, target, to=to, executor="inline")
        source = target
    convert(source, tmp_path / "back.pt", to="torch", executor="inline")
    got = torch.load(tmp_path / "back.pt", weights_only=True)
    assert_same(got, torch.load(original, weights_only=True))
    assert got["kinds"]["large"].data_ptr() == got["kinds"]["tied"].data_ptr()
    assert got["model"]._metadata == OrderedDict({"": {"version": 1}})
    assert list(got["optimizer"]["state"]) == [0, 1, 2, 3, 4, 5]


def test_a_filtered_part_keeps_its_structure(original: Path, tmp_path: Path) -> None:
    """What is left out leaves no traces, and the rest has the same containers."""
    convert(original, tmp_path / "part.pt", to="torch", only=["optimizer", "layers"], executor="inline")
    got = torch.load(tmp_path / "part.pt", weights_only=True)
    expected = torch.load(original, weights_only=True)
    assert_same(got, {key: expected[key] for key in ("optimizer", "layers")})


def test_renamed_entries_leave_their_containers(original: Path, tmp_path: Path) -> None:
    """A renamed entry goes where its name says; none is lost."""
    rename = {r"^optimizer\.state\.0\.exp_avg$": "first", r"^layers\.": "parts."}
    convert(original, tmp_path / "part.pt", to="torch", rename=rename, executor="inline")
    got = torch.load(tmp_path / "part.pt", weights_only=True)
    expected = torch.load(original, weights_only=True)
    assert torch.equal(got["first"], expected["optimizer"]["state"][0]["exp_avg"])
    assert {str(key) for key in got["optimizer"]["state"][0]} == {"step", "exp_avg_sq"}
    assert torch.equal(got["parts.0"], expected["layers"][0])


def test_safetensors_files_of_others(tmp_path: Path) -> None:
    """What their library wrote, as one file and as a folder, to all formats."""
    tensors = {"b": torch.randn(3, 4), "a": torch.arange(5), "c": torch.randn(2).to(torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "model.safetensors", tmp_path / "copy", to="dcp", executor="inline")
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "copy", no_dist=True)
    assert_same(loaded, tensors)
    convert(tmp_path / "copy", tmp_path / "back.safetensors", to="safetensors", executor="inline")
    original = (tmp_path / "model.safetensors").read_bytes()
    assert (tmp_path / "back.safetensors").read_bytes() == original
    folder = tmp_path / "folder"
    convert(tmp_path / "model.safetensors", folder, to="safetensors", shard_bytes=16, executor="inline")
    convert(folder, tmp_path / "again.pt", to="torch", executor="inline")
    got = torch.load(tmp_path / "again.pt", weights_only=True)
    assert_same(dict(sorted(got.items())), dict(sorted(tensors.items())))


@pytest.mark.exhaustive
def test_a_large_transposed_tensor_is_read_once_or_twice(tmp_path: Path) -> None:
    """Each window of the output has a little of all of the payload, which is not read whole for each; it is
    verified all the same."""
    tensor = torch.arange(6000 * 5000, dtype=torch.float32).reshape(5000, 6000).t()
    torch.save({"w": tensor}, tmp_path / "model.pt")
    report = convert(tmp_path / "model.pt", tmp_path / "copy", to="dcp", executor="inline")
    assert report.bytes_read < 1.1 * tensor.nbytes
    assert report.blocks_unverified == 0
    loaded = {"w": torch.zeros(6000, 5000)}
    dcp.load(loaded, checkpoint_id=tmp_path / "copy", no_dist=True)
    assert torch.equal(loaded["w"], tensor)
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
        convert(tmp_path / "bad.pt", tmp_path / "other", to="dcp", executor="inline")
    assert not (tmp_path / "other").exists()


def test_a_bare_tensor(tmp_path: Path) -> None:
    """A file that holds no dict at all."""
    torch.save(torch.arange(12.0).reshape(3, 4).t(), tmp_path / "tensor.pt")
    convert(tmp_path / "tensor.pt", tmp_path / "copy", to="dcp", executor="inline")
    convert(tmp_path / "copy", tmp_path / "back.pt", to="torch", executor="inline")
    got = torch.load(tmp_path / "back.pt", weights_only=True)
    assert_same(got, torch.arange(12.0).reshape(3, 4).t())


def test_a_name_without_letters(tmp_path: Path) -> None:
    """A dict may have the empty key; renaming something to it is a mistake."""
    dcp.save({"": torch.ones(2), "a": torch.zeros(1)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    for to, name in (("torch", "model.pt"), ("safetensors", "model.safetensors"), ("dcp", "copy")):
        convert(tmp_path / "saved", tmp_path / name, to=to, executor="inline")
        loaded = {"": torch.zeros(2), "a": torch.ones(1)}
        dcp.load(loaded, checkpoint_id=tmp_path / name, no_dist=True)
        assert_same(loaded, {"": torch.ones(2), "a": torch.zeros(1)})
    with pytest.raises(PlanError, match="leaves nothing of the name 'a'"):
        convert(tmp_path / "saved", tmp_path / "none", to="dcp", rename={"^a$": ""}, executor="inline")
