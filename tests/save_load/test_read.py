"""`dcp.read`: load a checkpoint without a state dict."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from tests.command_line.cli_support import rewrite_manifest
from tests.support.harmless_values import same
from tests.support.ranks import run_ranks


def a_state() -> dict[str, Any]:
    """Return a nested training state with int keys, lists, an empty dict and plain values."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optim": optimizer.state_dict(),
        "layers": [{"w": torch.full((2,), float(number))} for number in range(3)],
        "empty": {},
        "history": [1, 2.5, "three", None],
        "size": (2, 3),
        "step": 7,
    }


def test_read_returns_the_saved_state_dict(tmp_path: Path) -> None:
    """Nesting, order, and types of keys and values come back; an optimizer takes its state."""
    state = a_state()
    dcp.save(state, checkpoint_id=tmp_path)
    found = dcp.read(tmp_path)
    assert same(found, state)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(found["optim"])
    first = next(iter(model.parameters()))
    assert torch.equal(optimizer.state[first]["exp_avg"], state["optim"]["state"][0]["exp_avg"])


def test_globs_select_entries(tmp_path: Path) -> None:
    """Globs include and exclude entries; an entry of a list stays at its position."""
    state = a_state()
    dcp.save(state, checkpoint_id=tmp_path)
    assert same(dcp.read(tmp_path, only="model"), {"model": state["model"]})
    found = dcp.read(tmp_path, only=["*.bias", "step"], exclude="model.1.bias")
    assert same(found, {"model": {"0.bias": state["model"]["0.bias"]}, "step": 7})
    assert same(dcp.read(tmp_path, only="layers.1"), {"layers": [None, state["layers"][1]]})
    found = dcp.read(tmp_path, only="optim.state.0.*")
    assert same(found, {"optim": {"state": {0: state["optim"]["state"][0]}}})
    with pytest.raises(dcp.MissingKeyError, match="did you mean model"):
        dcp.read(tmp_path, only="modle")
    with pytest.raises(dcp.errors.PlanError, match="select nothing"):
        dcp.read(tmp_path, only="step", exclude="st*")


def test_names_and_dtypes_are_changed_as_in_a_conversion(tmp_path: Path) -> None:
    """``rename`` maps the checkpoint's names to the result's names; integers keep their dtype."""
    state = {"net": {"w": torch.arange(4.0), "n": torch.arange(3)}, "step": 1}
    dcp.save(state, checkpoint_id=tmp_path)
    found = dcp.read(tmp_path, rename={r"^net\.": "model."}, dtype=torch.bfloat16)
    assert same(found["model.w"], torch.arange(4.0, dtype=torch.bfloat16))
    assert same(found["model.n"], torch.arange(3))
    assert found["step"] == 1
    found = dcp.read(tmp_path, only="net", dtype={"*.w": "float64"})
    assert found["net"]["w"].dtype is torch.float64
    with pytest.raises(dcp.errors.PlanError, match="dtype"):
        dcp.read(tmp_path, dtype="int3")


def test_tied_tensors_are_one_tensor(tmp_path: Path) -> None:
    """Tied tensors of a torch file are one tensor in the result."""
    weight = torch.arange(6.0)
    torch.save({"embed": weight, "head": weight, "other": weight.clone()}, tmp_path / "m.pt")
    found = dcp.read(tmp_path / "m.pt")
    assert found["embed"] is found["head"]
    assert found["other"] is not found["head"]
    assert list(found) == ["embed", "head", "other"]


def test_checkpoints_of_every_format(tmp_path: Path) -> None:
    """Stock torch's folders, torch.save's files with any containers, safetensors and Hugging Face folders are
    read. A file that is no dict has the names that other functions use."""
    weights = {"model.a": torch.arange(4.0), "model.b": torch.ones(2, 2)}
    nested = {"model": {"a": weights["model.a"]}, "step": 3}
    stock.save(nested, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert same(dcp.read(tmp_path / "stock"), nested)
    containers = {
        "model": OrderedDict(a=torch.ones(2)),
        "pair": (torch.zeros(1), "text"),
        "state": {0: {"step": torch.tensor(1.0)}, 1: {}},
        "shape": torch.Size([2, 3]),
    }
    for name, value, expected in (
        ("x", containers, containers),
        ("tensor", torch.arange(3), {"tensor": torch.arange(3)}),
        ("list", [torch.zeros(1), {"a": 2}], {"0": torch.zeros(1), "1.a": 2}),
    ):
        torch.save(value, tmp_path / f"{name}.pt")
        assert same(dcp.read(tmp_path / f"{name}.pt"), expected)
    (tmp_path / "hf").mkdir()
    names = {name: f"model-{number}-of-2.safetensors" for number, name in enumerate(weights)}
    for name, file in names.items():
        save_file({name: weights[name]}, tmp_path / "hf" / file)
    index = json.dumps({"metadata": {}, "weight_map": names})
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(index)
    save_file(weights, tmp_path / "x.safetensors")
    assert same(dcp.read(tmp_path / "hf"), weights)
    assert same(dcp.read(tmp_path / "x.safetensors"), weights)


class Own:
    """A class of a user."""


def test_pickled_classes_need_trust(tmp_path: Path) -> None:
    """A pickled class is refused by name, excluded, or allowed, but never dropped without an error."""
    dcp.save({"w": torch.ones(2), "own": Own()}, checkpoint_id=tmp_path / "dcp")
    torch.save({"w": torch.ones(2), "own": Own()}, tmp_path / "x.pt")
    for place in (tmp_path / "dcp", tmp_path / "x.pt"):
        with pytest.raises(dcp.errors.UnsafeObjectError, match="own"):
            dcp.read(place)
        assert list(dcp.read(place, exclude="own")) == ["w"]
    assert isinstance(dcp.read(tmp_path / "dcp", weights_only=False)["own"], Own)


def test_foreign_storages_and_invalid_options(tmp_path: Path) -> None:
    """torch's reader works, and invalid options raise before any read."""
    dcp.save({"a": {"w": torch.arange(3.0)}, "step": 2}, checkpoint_id=tmp_path)
    found = dcp.read(storage_reader=stock.FileSystemReader(tmp_path), only="a")
    assert same(found, {"a": {"w": torch.arange(3.0)}})
    with pytest.raises(dcp.CheckpointError, match="verify"):
        dcp.read(storage_reader=stock.FileSystemReader(tmp_path), verify="full")
    with pytest.raises(dcp.errors.PlanError, match="only"):
        dcp.read(tmp_path, only=[])
    with pytest.raises(dcp.CheckpointNotFoundError):
        dcp.read(tmp_path / "absent")
    with pytest.raises(dcp.CheckpointError, match="checkpoint_id"):
        dcp.read()


@pytest.mark.parametrize(
    ("notes", "has_parts"),
    [
        ({"containers": [], "values": 5}, False),
        ({"containers": [], "values": ["b"]}, False),
        ({"containers": [{"path": ["a"], "kind": "dict", "keys": 5}], "values": {}}, True),
    ],
)
def test_invalid_structure_notes_are_refused(tmp_path: Path, notes: dict[str, Any], has_parts: bool) -> None:
    """Invalid structure notes raise CheckpointFormatError; a part loads without the note of one container."""
    dcp.save({"a": {0: torch.ones(2)}, "b": torch.ones(2)}, checkpoint_id=tmp_path)

    def change(fields: dict[str, Any]) -> None:
        _, zero, packed = fields["provenance"]
        provenance = msgpack.unpackb(packed) | {"structure": {"version": 1, **notes}}
        packed = msgpack.packb(provenance)
        fields["provenance"] = [len(packed), zero, packed]

    rewrite_manifest(tmp_path, change)
    with pytest.raises(dcp.errors.CheckpointFormatError, match="stored structure of the state"):
        dcp.read(tmp_path)
    if has_parts:
        assert torch.equal(dcp.read(tmp_path, only="a")["a"]["0"], torch.ones(2))
    else:
        with pytest.raises(dcp.errors.CheckpointFormatError, match="stored structure of the state"):
            dcp.read(tmp_path, only="a")


def read_together(rank: int, world_size: int, root: Path) -> Any:
    """Save a sharded state by two ranks, read it on both, and on each alone."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(20.0).reshape(5, 4)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "own": dcp.PerRank({"rank": rank})}
    dcp.save(state, checkpoint_id=root)
    found = dcp.read(root)
    alone = dcp.read(root, only="own", no_dist=True)
    dist.barrier()
    try:
        dcp.read(root, only="w" if rank == 0 else "absent")
    except dcp.MissingKeyError as error:
        return found["w"].equal(whole), alone, str(error)
    return None


def test_every_rank_gets_whole_tensors(tmp_path: Path) -> None:
    """Tensors are read whole with all ranks' `PerRank` values, and an error is raised on all ranks."""
    for result in run_ranks(2, read_together, tmp_path / "x"):
        is_whole, alone, message = result
        assert is_whole
        assert sorted(value["rank"] for value in alone["own"].values()) == [0, 1]
        assert "rank 1" in message
