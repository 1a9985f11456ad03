"""`dcp.prove`: the model equals the checkpoint, or the report names the ranks that differ."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp
from tests.support.ranks import run_ranks


class Model(nn.Module):
    """A model to shard by columns and by rows, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 24)
        self.down = nn.Linear(24, 10)
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return a result with gradients."""
        result: torch.Tensor = self.down(torch.relu(self.up(batch)))
        return result


class Training:
    """A model on a mesh, its optimizer, and a data loader and generator per rank."""

    def __init__(self, rank: int, world: int, how: str, seed: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(seed)
        self.model = Model()
        if how == "2d":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(self.model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(self.model, mesh=mesh["dp"])
        elif world > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = StatefulDataLoader([*range(40)], batch_size=2, shuffle=True)
        self.generator = torch.Generator().manual_seed(rank)

    def step(self, count: int) -> None:
        """Train ``count`` steps on batches that are equal on all ranks."""
        for number, _ in zip(range(count), self.loader, strict=False):
            torch.manual_seed(number)
            self.model(torch.randn(4, 10)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return the state to save, load and prove."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "loader": dcp.PerRank(self.loader.state_dict()),
            "generator": dcp.PerRank(self.generator.get_state()),
            "random": dcp.PerRank(random.getstate()),
            "schedule": {"warmup": 10, "milestones": (1, 2), "name": "cosine"},
        }


def save_and_prove(rank: int, world: int, folder: str) -> str:
    """Train three steps, save, and prove."""
    training = Training(rank, world, "2d", seed=1)
    training.step(3)
    dcp.save(training.state(), storage_writer=dcp.FileSystemWriter(folder, digests=True))
    return dcp.prove(training.state(), folder).to_json()


def load_and_prove(rank: int, world: int, folder: str, how: str) -> str:
    """Load on another mesh, and prove all but the state per rank."""
    training = Training(rank, world, how, seed=2)
    state = {
        key: value for key, value in training.state().items() if key in ("model", "optimizer", "schedule")
    }
    before = dcp.prove(state, folder, only=["model", "optimizer.state", "schedule"])
    assert not before.ok and "tensor" in {found.kind for found in before.findings}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    now = {
        **state,
        **dict(zip(("model", "optimizer"), get_state_dict(training.model, training.optimizer), strict=True)),
    }
    return dcp.prove(now, folder, exclude=["loader", "generator", "random"]).to_json()


def test_a_checkpoint_is_proved_on_any_mesh(tmp_path: Path) -> None:
    """A checkpoint of FSDP2 with tensor parallelism on four ranks is proved there, on FSDP2 with three ranks,
    and on one process. Only the manifest is read, and the report has each rank's share."""
    folder = str(tmp_path / "one")
    reports = run_ranks(4, save_and_prove, folder)
    assert len({*reports}) == 1
    proof = dcp.Proof.of_json(reports[0])
    assert proof.ok and proof.bytes_read == 0 and proof.world_size == 4 and not proof.left
    assert [share.rank for share in proof.ranks] == [0, 1, 2, 3]
    assert all(share.bytes > 0 and share.values > 5 and share.tensors > 10 for share in proof.ranks)
    assert json.loads(reports[0])["ok"] is True
    for world, how in ((3, "fsdp"), (1, "alone")):
        found = dcp.Proof.of_json(run_ranks(world, load_and_prove, folder, how)[0])
        assert found.ok, found.findings
        assert found.bytes_read == 0 and found.world_size == world
        names = [fqn for fqn in dcp.open_index(folder).fqns if fqn.startswith(("model.", "optimizer."))]
        assert found.tensors == len(names) == 17


def damage_and_prove(rank: int, world: int, folder: str) -> dict[str, str]:
    """Prove with one change after another on some ranks."""
    training = Training(rank, world, "fsdp", seed=1)
    training.step(2)
    dcp.save(training.state(), storage_writer=dcp.FileSystemWriter(folder, digests=True))
    found = {}
    for damage in DAMAGES:
        state = copy.deepcopy(training.state())
        weight, moments = state["model"]["up.weight"], state["optimizer"]["state"]["down.weight"]
        if damage == "shard" and rank == 2:
            weight.to_local()[1, 3] += 0.5
        elif damage == "replica" and rank == 1:
            state["model"]["seen"] += 1
        elif damage == "moment" and rank == 0:
            moments["exp_avg"].to_local()[0, 0] = 3.0
        elif damage == "generator" and rank == 1:
            state["generator"] = dcp.PerRank(torch.Generator().manual_seed(99).get_state())
        elif damage == "value" and rank == 1:
            state["schedule"]["warmup"] = 11
        elif damage == "name":
            state["model"]["other"] = state["model"].pop("up.bias")
        elif damage == "dtype":
            local = weight.to_local().double()
            state["model"]["up.weight"] = DTensor.from_local(local, weight.device_mesh, weight.placements)
        found[damage] = dcp.prove(state, folder).to_json()
    return found


DAMAGES: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "shard": [("tensor", "model.up.weight", (2,))],
    "replica": [("tensor", "model.seen", (1,))],
    "moment": [("tensor", "optimizer.state.down.weight.exp_avg", (0,))],
    "generator": [("tensor", "generator.rank-1", (1,))],
    "value": [("value", "schedule.warmup", (1,))],
    "name": [("missing", "model.up.bias", (0, 1, 2)), ("unexpected", "model.other", (0, 1, 2))],
    "dtype": [("dtype", "model.up.weight", (0, 1, 2))],
}


def test_differences_are_named_with_their_ranks(tmp_path: Path) -> None:
    """A change of a shard, replica, Adam moment, generator, value, name or dtype is the only finding."""
    (reports, *_) = run_ranks(3, damage_and_prove, str(tmp_path / "one"))
    for damage, expected in DAMAGES.items():
        proof = dcp.Proof.of_json(reports[damage])
        found = [(each.kind, each.fqn, each.ranks) for each in proof.findings]
        assert [each[:2] for each in found] == [each[:2] for each in expected], damage
        assert damage == "name" or found == expected, damage
        if len(expected[0][2]) == 1:
            assert [share.rank for share in proof.ranks if share.differing] == [*expected[0][2]]
            assert str(expected[0][2][0]) in proof.findings[0].message
        assert not proof.ok and expected[0][1] in proof.findings[0].message


def test_checkpoints_without_digests_and_other_formats_are_read(tmp_path: Path) -> None:
    """For torch.save's files and checkpoints without digests the tensors are read and compared."""
    state: dict[str, Any] = {
        "w": torch.randn(30, 7),
        "s": torch.tensor(1.5),
        "e": torch.zeros(0, 3),
        "n": {"k": (1, "x")},
    }
    torch.save(state, tmp_path / "x.pt")
    dcp.save(state, checkpoint_id=tmp_path / "off")
    for name in ("x.pt", "off"):
        proof = dcp.prove(state, tmp_path / name)
        assert proof.ok and proof.bytes_read >= state["w"].nbytes, proof.findings
    state["w"][29, 6] += 1
    state["n"]["k"] = (1.0, "x")
    for name in ("x.pt", "off"):
        found = dcp.prove(state, tmp_path / name).findings
        assert [(one.kind, one.fqn, one.ranks) for one in found] == [
            ("tensor", "w", (0,)),
            ("value", "n.k", (0,)),
        ]


def parts_of(whole: torch.Tensor, *parts: tuple[int, int]) -> Any:
    """Return the given row ranges of ``whole``, concatenated, as a CheckpointableTensor."""
    made: Any = torch.cat([whole[first:end] for first, end in parts])
    sizes = [end - first for first, end in parts]
    made.global_shape, made.local_sizes = tuple(whole.shape), tuple((size,) for size in sizes)
    made.global_offsets = tuple((first,) for first, _ in parts)
    made.local_offsets = tuple((sum(sizes[:number]),) for number in range(len(sizes)))
    return made


HELD = {
    "apart": ([(0, 3), (3, 8)], []),
    "overlap and gap of equal size": ([(0, 4), (2, 6)], ["overlap", "incomplete"]),
    "overlap": ([(0, 5), (3, 8)], ["overlap"]),
    "one within another": ([(0, 6), (2, 4)], ["overlap", "incomplete"]),
    "missing": ([(0, 3), (4, 8)], ["incomplete"]),
}


@pytest.mark.parametrize("has_digests", [True, False])
@pytest.mark.parametrize("name", HELD)
def test_parts_have_each_element_once(tmp_path: Path, name: str, has_digests: bool) -> None:
    """Parts have each element once with the saved bytes; overlaps do not make up for missing elements."""
    whole = torch.arange(8.0)
    dcp.save({"w": whole}, storage_writer=dcp.FileSystemWriter(tmp_path, digests=has_digests))
    parts, kinds = HELD[name]
    found = dcp.prove({"w": parts_of(whole, *parts)}, tmp_path).findings
    assert [one.kind for one in found] == kinds
    if "incomplete" in kinds:
        held = len({row for first, end in parts for row in range(first, end)})
        assert f"{held} of its 8 elements" in found[-1].message


def hostile_state() -> dict[str, Any]:
    """Return values that numeric comparison would misjudge, empty tensors, and shared memory."""
    made = torch.arange(24.0)
    return {
        "nan": torch.tensor([float("nan"), 1.0, -float("inf")]),
        "zero": torch.tensor([0.0, -0.0]),
        "scalar": torch.tensor(-0.0, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 5),
        "complex": torch.randn(6, dtype=torch.complex64).conj(),
        "fp8": made.to(torch.float8_e4m3fn),
        "tied": made.view(4, 6),
        "again": made.view(4, 6).t(),
        "odd/name.\x1b[31m*?[a]": torch.ones(2),
        "values": {"nan": float("nan"), "zero": -0.0, "text": "ä\x00", "none": None},
    }


CHANGES: dict[str, tuple[str, Any]] = {
    "nan": (
        "tensor",
        torch.tensor([0x7FC00001, 0x3F800000, -0x800000], dtype=torch.int32).view(torch.float32),
    ),
    "zero": ("tensor", torch.tensor([0.0, 0.0])),
    "scalar": ("shape", torch.tensor([-0.0], dtype=torch.bfloat16)),
    "empty": ("shape", torch.zeros(5, 0)),
    "complex": ("dtype", torch.zeros(6, dtype=torch.complex128)),
    "fp8": ("dtype", torch.arange(24.0).to(torch.float8_e5m2)),
    "again": ("tensor", torch.zeros(6, 4)),
}


@pytest.mark.parametrize("has_digests", [True, False])
def test_bytes_are_compared_not_numbers(tmp_path: Path, has_digests: bool) -> None:
    """Bytes are compared, not numbers: NaNs with different bits differ, and -0.0 differs from 0.0. This holds
    for empty, 0-d, 8-bit, conjugated, tied and transposed tensors, and each change is reported by kind."""
    state = hostile_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, digests=has_digests))
    assert dcp.prove(state, tmp_path).findings == ()
    for fqn, (kind, other) in CHANGES.items():
        (found,) = dcp.prove({**state, fqn: other}, tmp_path).findings
        assert (found.kind, found.fqn, found.ranks) == (kind, fqn, (0,))
    state["values"]["zero"] = 0.0
    (found,) = dcp.prove(state, tmp_path).findings
    assert (found.kind, found.fqn) == ("value", "values.zero")
