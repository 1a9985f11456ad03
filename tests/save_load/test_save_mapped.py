"""`dcp.save` through a weight map: the result equals a save and a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import dcp
from dcp.errors import OptionError, PlanError
from tests.command_line.cli_support import run
from tests.save_load.code_paths import error_of
from tests.save_load.test_load_mapped import FUSED, assert_equal, fused, numbered, separate
from tests.support.ranks import run_ranks

SPLIT = dcp.weight_map(FUSED, inverse=True, vocab=13, hidden=24)


def read(path: Path) -> dict[str, Any]:
    """Read by stock torch, which has no maps."""
    metadata = stock.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, stock.metadata.TensorStorageMetadata)
    }
    stock.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_a_mapped_save_equals_save_then_conversion(tmp_path: Path) -> None:
    """A mapped save fuses and pads, or splits and cuts, and stock torch reads the result."""
    dcp.save(separate(), checkpoint_id=tmp_path / "fused", map=FUSED, no_dist=True)
    assert read(tmp_path / "fused").keys() == fused().keys()
    assert_equal(read(tmp_path / "fused"), fused())
    dcp.save(fused(), checkpoint_id=tmp_path / "apart", map=SPLIT, no_dist=True)
    assert read(tmp_path / "apart").keys() == separate().keys()
    assert_equal(read(tmp_path / "apart"), separate())
    state = {name: torch.zeros_like(tensor) for name, tensor in separate().items()}
    dcp.load(state, checkpoint_id=tmp_path / "fused", map=SPLIT)
    assert dcp.prove(state, tmp_path / "fused", map=FUSED).ok
    kinds = {found.kind for found in dcp.prove(state, tmp_path / "fused").findings}
    assert kinds == {"missing", "unexpected", "shape"}
    dcp.save(separate(), checkpoint_id=tmp_path / "plain", no_dist=True)
    dcp.convert(tmp_path / "plain", tmp_path / "converted", to="dcp", map={**FUSED, "name": "fuse"})
    names = {"fused": "given", "apart": "the weight map (inverse)", "plain": None, "converted": "fuse"}
    maps = {name: dcp.open_index(tmp_path / name).provenance.get("map") for name in names}
    assert maps == names
    assert run("diff", tmp_path / "fused", tmp_path / "converted").status == 0


def save_sharded(rank: int, world_size: int, path: str, how: str) -> None:
    """Save parts on a mesh of two by two, some of them replicated, in one of three ways."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements: dict[str, list[Placement]] = {
        "0.q.weight": [Shard(0), Shard(0)],
        "0.k.weight": [Replicate(), Shard(1)],
        "0.v.weight": [Shard(0), Replicate()],
        "0.down.weight": [Shard(1), Shard(0)],
        "experts.3": [Shard(1), Shard(1)],
    }
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, placements.get(name, [Shard(0), Replicate()]))
        for name, tensor in separate().items()
        if name != "norm.weight"
    }
    state |= {"norm.weight": separate()["norm.weight"], "step": 7, "opt": {"groups": [{"lr": 0.5}]}}
    if how == "save":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, digests=True), map=FUSED)
        proof = dcp.prove(state, path, map=FUSED)
        assert proof.ok and proof.bytes_read == 0 and proof.tensors == len(fused()), proof.findings
        if rank == 1:
            state["0.q.weight"].to_local()[0, 0] += 1
        changed = [
            (found.kind, found.fqn, found.ranks) for found in dcp.prove(state, path, map=FUSED).findings
        ]
        assert changed == [("tensor", "0.qk.weight", (1,))], changed
        return
    kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
    future = dcp.async_save(state, checkpoint_id=path, map=FUSED, async_checkpointer_type=kind)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            torch.Tensor.zero_(value)
    future.result()


@pytest.mark.parametrize(
    "how", ["thread", *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("save", "process"))]
)
def test_shards_of_several_ranks(tmp_path: Path, how: str) -> None:
    """Each box is written once, a replica by one rank, and values keep their names. Permuted tensors are
    copied before training continues."""
    run_ranks(4, save_sharded, str(tmp_path / "c"), how)
    found = dcp.read(tmp_path / "c")
    assert_equal(found, fused())
    assert found["step"] == 7
    assert found["opt"] == {"groups": [{"lr": 0.5}]}
    stored = sum(tensor.nbytes for tensor in fused().values())
    assert sum(path.stat().st_size for path in (tmp_path / "c").glob("*.distcp")) < stored + (64 << 10)
    assert run("verify", tmp_path / "c").status == 0


def test_tied_copies_are_stored_once(tmp_path: Path) -> None:
    """Copies by a map are stored once, as tied weights are."""
    weights = {"rules": [{"from": {"e": "v w"}, "to": {"tok": "v w", "head": "v w"}, "copies": ["head"]}]}
    whole = numbered(512, 64)
    dcp.save({"e": whole}, checkpoint_id=tmp_path, map=weights, no_dist=True)
    found = dcp.read(tmp_path)
    assert torch.equal(found["tok"], whole)
    assert torch.equal(found["head"], whole)
    (data,) = tmp_path.glob("*.distcp")
    assert data.stat().st_size < 1.5 * whole.nbytes


def save_half_of_the_experts(rank: int, world_size: int, path: str) -> str:
    """Save half of the experts on each rank, which the map stacks; return the error."""
    names = [name for name in separate() if name.startswith("experts")]
    own = {name: separate()[name] for name in names[rank::world_size]}
    return error_of(lambda: dcp.save(own, checkpoint_id=path, map=FUSED))


def test_invalid_mapped_saves_raise_before_a_write(tmp_path: Path) -> None:
    """Keys without a rule, parts of other ranks, too many boxes and foreign writers raise before a write."""
    with pytest.raises(PlanError, match="no rule matches 'more'"):
        dcp.save(separate() | {"more": torch.ones(2)}, checkpoint_id=tmp_path / "c", map=FUSED, no_dist=True)
    for text in run_ranks(2, save_half_of_the_experts, str(tmp_path / "c")):
        assert "expert 1 is missing" in text or "expert 0 is missing" in text
    apart_ = {"rules": [{"from": {"x": "a b", "z": "a d"}, "to": {"y": "(a (b + d))"}}]}
    state = {"x": torch.ones(5000, 1), "z": torch.ones(5000, 1)}
    with pytest.raises(PlanError, match="would be 5000 boxes of 'y'"):
        dcp.save(state, checkpoint_id=tmp_path / "c", map=apart_, no_dist=True)
    with pytest.raises(OptionError, match="map= requires"):
        writer = stock.FileSystemWriter(tmp_path / "c")
        dcp.save({}, storage_writer=writer, map=FUSED, no_dist=True)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "kind",
    ["float8_e4m3fn", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("bool", "complex128"))],
)
def test_empty_and_0d_tensors_are_mapped(tmp_path: Path, kind: str) -> None:
    """Empty and 0-d tensors and views of unusual dtypes are mapped there and back."""
    whole = (torch.arange(24) % 2).to(getattr(torch, kind)).view(4, 6)
    state = {"x": whole, "t": whole.T, "n": whole[:0], "s": whole[1, 1]}
    rules: list[dict[str, Any]] = [{"from": {name: "a b"}, "to": {f"{name}2": "b a"}} for name in "xtn"]
    rules.append({"from": {"s": ""}, "to": {"s2": ""}})
    dcp.save(state, checkpoint_id=tmp_path / "c", map={"rules": rules}, no_dist=True)
    found = dcp.read(tmp_path / "c")
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    inverse = dcp.weight_map({"rules": rules}, inverse=True)
    dcp.load(back, checkpoint_id=tmp_path / "c", map=inverse, no_dist=True)
    for name, tensor in state.items():
        for made, wanted in ((found[f"{name}2"], tensor.t()), (back[name], tensor)):
            assert made.shape == wanted.shape
            one, other = (each.reshape(-1).view(torch.uint8) for each in (made, wanted))
            assert torch.equal(one, other), name
