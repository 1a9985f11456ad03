"""Parts of the writer process. Internal: messages and verdicts, in orders that a public call cannot cause."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import dcp
from dcp.background import link, transfer
from dcp.background.process_writer import Ending, verdict
from dcp.background.transfer import error_to_data
from dcp.errors import CheckpointError, ReplicaMismatchError, StorageError
from dcp.ranks.failures import failure_of
from dcp.staging import DefaultStager


def through(value: Any) -> Any:
    """Return ``value`` as the writer process receives it."""
    staged = DefaultStager().stage_local(value, shared=True)
    arena = staged.arena
    data = transfer.pack(staged.done.result(240), "a value", arena)
    assert arena is not None and arena.fd is not None
    return transfer.unpack(data, transfer.map_memory(arena.fd, arena.size_bytes))


def test_dtensors_reach_the_writer_without_groups() -> None:
    """A DTensor keeps its local tensor, placements and coordinate in a mesh without process groups."""
    mesh = DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=2)
    spec = DTensorSpec(mesh, (Replicate(), Shard(0)), TensorMeta(torch.Size((5, 3)), (3, 1), torch.float32))
    local = torch.randn(3, 3)
    given = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    got = through({"a": given, "b": given})
    for name in ("a", "b"):
        assert isinstance(got[name], DTensor)
        assert got[name].shape == (5, 3) and got[name].placements == (Replicate(), Shard(0))
        assert torch.equal(got[name]._local_tensor, local)
        assert tuple(got[name].device_mesh.get_coordinate() or ()) == (1, 0)  # a list in torch 2.10
        assert got[name].device_mesh.mesh_dim_names == ("dp", "tp")
    assert got["a"].device_mesh is got["b"].device_mesh


FAILED = error_to_data(failure_of("plan", {1: ReplicaMismatchError("differ", fqn="w")}, 0, None))
LATE = error_to_data(failure_of("write", {0: StorageError("no .metadata", committed=True)}, 0, None))
UNHEARD = error_to_data(CheckpointError("late", committed=True))


@pytest.mark.parametrize(
    ("endings", "together", "expected"),
    [
        ([Ending(saved=True, save_id="a"), Ending(saved=True, save_id="a")], True, (None, False)),
        ([Ending(saved=True, save_id="a"), Ending(died="was killed")], True, (None, True)),
        ([Ending(died="was killed"), Ending(error=FAILED, broken=True)], True, ("WriterProcessError", True)),
        ([Ending(error=FAILED), Ending(error=FAILED)], True, ("ReplicaMismatchError", False)),
        ([Ending(saved=True, save_id="a"), Ending(died="was killed")], False, ("WriterProcessError", True)),
        ([Ending(error=UNHEARD, broken=True), Ending(died="x")], True, (None, True)),
        ([Ending(error=LATE), Ending(error=LATE)], True, ("StorageError", False)),
        ([Ending(error=LATE), Ending(died="x")], True, ("StorageError", True)),
    ],
)
def test_all_ranks_reach_the_same_verdict(
    endings: list[Ending], together: bool, expected: tuple[str | None, bool]
) -> None:
    """All ranks reach the same verdict: a known commit decides, and a death precedes the errors it caused."""
    known = {rank: Ending.decode(ending.encode()) for rank, ending in enumerate(endings)}
    for rank in known:
        error, _, restart = verdict(known, rank, together=together)
        assert restart is expected[1]
        if expected[0] is None:
            assert error is None
        else:
            names = {cls.__name__ for cls in type(error).__mro__}
            assert {"RankFailedError", expected[0]} <= names


def test_an_invalid_reply_fails_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid reply of the writer process fails one save with a clear error; the next has a new
    process."""

    def unpackb(data: bytes, **how: Any) -> Any:
        return msgpack.unpackb(data, **how) | {"ending": {"ended": True}}

    kind = dcp.AsyncCheckpointerType.PROCESS
    save = partial(dcp.async_save, {"a": torch.ones(2)}, no_dist=True, async_checkpointer_type=kind)
    with monkeypatch.context() as patch:
        patch.setattr(link, "msgpack", SimpleNamespace(packb=msgpack.packb, unpackb=unpackb))
        with pytest.raises(dcp.errors.WriterProcessError, match="sent an invalid message and was killed: Ty"):
            save(checkpoint_id=tmp_path / "1").result(240)
    save(checkpoint_id=tmp_path / "2").result(240)
    assert dcp.read(tmp_path / "2")["a"].sum() == 2
