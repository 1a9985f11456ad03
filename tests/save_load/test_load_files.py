"""dcp.load, show and verify of files by other tools, compared with stock torch and transformers."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from dcp.errors import CheckpointConflictError, UnsafeObjectError
from tests.save_load.code_paths import TakesObjects
from tests.support.ranks import run_ranks
from tests.support.torch_files import as_bytes, assert_same


def _zeroed(value: Any) -> Any:
    """Return the same structure with zeros and None, as the target of a load."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: _zeroed(item) for key, item in value.items()}
    return type(value)(map(_zeroed, value)) if isinstance(value, list | tuple) else None


@pytest.mark.parametrize("is_converted", [False, True])
def test_every_value_of_a_torch_file_loads(tmp_path: Path, is_converted: bool) -> None:
    """A training state loads: model, optimizer with int keys and groups, views, strides, fp8, plain values,
    and tuples of tensors, which a save keeps as one value."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 3))
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False
    )
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    base = torch.arange(2000.0)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "odd": {
            "t": base.view(40, 50).t(),
            "cl": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "expanded": base[:7, None].expand(7, 5),
            "windows": base.unfold(0, 9, 4),
            "every third": base[::3],
            "fp8": torch.randn(9).to(torch.float8_e5m2),
            "complex": torch.randn(3, 3, dtype=torch.complex128),
            "bool": torch.tensor([True, False]),
            "empty": torch.zeros(0, 5),
            "scalar": torch.tensor(7),
        },
        "plain": {"epoch": 3, "name": "x", "words": [f"word {n}" for n in range(20_000)]},
    }
    torch.save(state, tmp_path / "model.pt")
    oracle = torch.load(tmp_path / "model.pt", weights_only=True)
    target = _zeroed(oracle)
    if is_converted:
        dcp.convert(tmp_path / "model.pt", tmp_path / "converted", to="dcp")
    source = tmp_path / ("converted" if is_converted else "model.pt")
    report = dcp.load(target, checkpoint_id=source, verify="full")
    for fqn in ("model", "odd"):
        for name, tensor in oracle[fqn].items():
            assert as_bytes(target[fqn][name]) == as_bytes(tensor), name
    assert_same(target["optimizer"], oracle["optimizer"])
    assert target["plain"] == oracle["plain"]
    assert report.missing == [] and report.unexpected == []


@pytest.mark.parametrize("dtype", ["exact", "cast"])
def test_a_large_transposed_tensor_is_read_once(tmp_path: Path, dtype: Any) -> None:
    """Threads and casts take parts in the file's order, so that no byte is read twice."""
    stored = torch.arange(4.0 * (1 << 20)).view(2 << 10, 2 << 10).t()
    torch.save({"w": stored}, tmp_path / "model.pt")
    target = torch.zeros(stored.shape, dtype=torch.float32 if dtype == "exact" else torch.float64)
    report = dcp.load({"w": target}, checkpoint_id=tmp_path / "model.pt", dtype=dtype)
    assert torch.equal(target, stored.to(target.dtype))
    assert report.bytes_read <= 1.5 * stored.nbytes


def test_a_requested_unsafe_entry_raises(tmp_path: Path) -> None:
    """A refused entry raises UnsafeObjectError if requested, not MissingKeyError; the rest loads."""
    state = {"w": torch.arange(3.0), "args": argparse.Namespace(x=1), "sparse": torch.eye(2).to_sparse()}
    torch.save(state, tmp_path / "model.pt")
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=tmp_path / "model.pt")
    assert torch.equal(target["w"], torch.arange(3.0))
    for name, value in (("args", None), ("sparse", torch.zeros(2, 2))):
        with pytest.raises(UnsafeObjectError, match=name):
            dcp.load({"w": target["w"], name: value}, checkpoint_id=tmp_path / "model.pt")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharded", [False, True])
def test_a_transformers_model_with_tied_embeddings(tmp_path: Path, sharded: bool) -> None:
    """save_pretrained's and torch.save's files of a model load into another model bit for bit."""
    import transformers  # the import takes seconds in each process that collects tests

    sizes: Any = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **sizes)
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hub", max_shard_size="20KB" if sharded else "1GB")
    torch.save(model.state_dict(), tmp_path / "model.pth")
    wanted = model.state_dict()
    assert (len(list((tmp_path / "hub").glob("*.safetensors"))) > 1) == sharded
    for source in (tmp_path / "hub", tmp_path / "model.pth"):
        names = dcp.open_index(source).position
        target = {fqn: torch.zeros_like(tensor) for fqn, tensor in wanted.items() if fqn in names}
        dcp.load(target, checkpoint_id=source)
        assert len(target) >= len(wanted) - 1  # safetensors keeps one of two tied names
        assert all(as_bytes(tensor) == as_bytes(wanted[fqn]) for fqn, tensor in target.items())


def _load_sharded(rank: int, world_size: int, source: str, wanted: str, dim: int) -> int:
    """Load every tensor as a DTensor sharded along ``dim``, and return the bytes that this rank read."""
    mesh = init_device_mesh("cpu", (world_size,))
    oracle = torch.load(wanted, weights_only=True)
    target: dict[str, Any] = {
        fqn: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(dim)]) for fqn, tensor in oracle.items()
    }
    report = dcp.load(target, checkpoint_id=source)
    for fqn, tensor in oracle.items():
        own = distribute_tensor(tensor, mesh, [Shard(dim)]).to_local()
        assert as_bytes(target[fqn].to_local()) == as_bytes(own), fqn
    return int(report.bytes_read)


def test_each_rank_reads_its_own_bytes(tmp_path: Path) -> None:
    """Two ranks load shards along both dimensions from a torch file, a safetensors file and a folder."""
    tensors = {
        "large": torch.randn(1024, 1024),
        "bf16": torch.randn(64, 30).bfloat16(),
        "t": torch.randn(600, 500).t(),
    }
    torch.save(tensors, tmp_path / "model.pt")
    dense = {fqn: tensor.contiguous() for fqn, tensor in tensors.items()}
    save_file(dense, tmp_path / "model.safetensors")
    (tmp_path / "folder").mkdir()
    save_file(dense, tmp_path / "folder" / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    for source in ("model.pt", "model.safetensors", "folder"):
        for dim in (0, 1):
            read = run_ranks(2, _load_sharded, str(tmp_path / source), str(tmp_path / "model.pt"), dim)
            if source != "model.pt" and dim == 0:
                assert max(read) < 0.6 * total


class _Replacing:
    """A `Stateful` that replaces files when its state is requested, after the index was read."""

    def __init__(self, replace: Callable[[], None]) -> None:
        self.state = {"b": torch.zeros(64)}
        self._replace = replace

    def state_dict(self) -> dict[str, Any]:
        self._replace()
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _write_sharded(folder: Path, number: int) -> None:
    """Write a Hugging Face folder of four files, with ``number`` in every element."""
    folder.mkdir()
    keys = ("m.a", "m.b", "other.c", "other.d")
    names = {key: f"model-0000{n}-of-00004.safetensors" for n, key in enumerate(keys, 1)}
    for fqn, name in names.items():
        save_file({fqn: torch.full((64,), float(number))}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, TakesObjects])
@pytest.mark.parametrize("kind", ["safetensors", "torch_dcp"])
def test_files_replaced_one_by_one_are_detected(
    tmp_path: Path, kind: str, planner: type[dcp.DefaultLoadPlanner]
) -> None:
    """A folder without a commit may mix data: replaced files cause a second read, then an error."""
    if kind == "safetensors":
        _write_sharded(tmp_path / "current", 0)
        _write_sharded(tmp_path / "next", 1)
    else:
        for number, name in enumerate(("current", "next")):
            state = {"m": {"a": torch.full((64,), float(number)), "b": torch.full((64,), float(number))}}
            stock.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    replacements = sorted((tmp_path / "next").glob("*.safetensors" if kind == "safetensors" else "*.distcp"))

    def replace() -> None:
        if replacements:
            path = replacements.pop()
            os.utime(path, (1, len(replacements) + 10))
            path.replace(tmp_path / "current" / path.name)

    module, other = _Replacing(replace), torch.zeros(64)
    wanted = {"m": module, "n": other}
    rename = {"^n$": "m.a"}
    if kind == "safetensors":  # each attempt replaces one file
        with pytest.raises(CheckpointConflictError, match="was replaced during the load"):
            dcp.load(wanted, checkpoint_id=tmp_path / "current", planner=planner(), rename=rename)
    report = dcp.load(wanted, checkpoint_id=tmp_path / "current", planner=planner(), rename=rename)
    assert report.attempts == 2
    assert module.state["b"].eq(1).all() and other.eq(1).all()
