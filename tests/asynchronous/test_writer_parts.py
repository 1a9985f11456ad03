"""Parts of the writer process. Internal: messages, meeting and verdict, whose endings no door can order."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import dcp
from dcp.background.error_codec import Ending, error_from_data, error_to_data, plain_error, verdict
from dcp.background.process import pickled_state
from dcp.background.process.child import child_environment
from dcp.background.process.rendezvous import Address, meet, own_store
from dcp.background.process.wire import Connection, watch_parent, watch_process
from dcp.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    ReplicaMismatchError,
    StorageError,
    WriterProcessError,
)
from dcp.ranks.exchanges import DEFAULT_TIMEOUT_SECONDS
from dcp.ranks.failures import failure_of
from dcp.version import __version__
from tests.support.manager_runs import until
from tests.support.ports import refusing_port
from tests.support.ranks import run_ranks


def test_messages_wait_for_a_reader_that_comes_late() -> None:
    """Short and long ones with descriptors are sent without a reader, and arrive whole after the sender's
    end."""
    ours, theirs = map(Connection, socket.socketpair())
    memory = os.memfd_create("sent")
    os.write(memory, b"shared")
    ours.send({"kind": "short", "text": "ü\udce4"})
    ours.send({"kind": "long", "data": b"x" * 5_000_000}, [memory, memory])
    ours.offer({"kind": "offer"})
    os.close(memory)
    ours.close()
    first, second, third = theirs.receive(), theirs.receive(), theirs.receive()
    assert first is not None and second is not None and third is not None
    assert first.body == {"kind": "short", "text": "ü\udce4"}
    assert second.body["data"] == b"x" * 5_000_000
    assert [os.pread(fd, 10, 0) for fd in second.fds] == [b"shared", b"shared"]
    assert third.body == {"kind": "offer"}
    assert theirs.receive() is None
    for fd in second.fds:
        os.close(fd)
    theirs.close()


def test_offers_are_dropped_where_nobody_reads() -> None:
    """They never block, and what was not dropped is whole."""
    ours, theirs = map(Connection, socket.socketpair())
    for number in range(2000):
        ours.offer({"number": number, "filling": "x" * 1000})
    ours.close()
    arrived = 0
    while (message := theirs.receive()) is not None:
        assert message.body["number"] == arrived
        arrived += 1
    assert 0 < arrived < 2000
    theirs.close()


def test_a_peers_end_shows_though_a_fork_holds_its_socket() -> None:
    """The process at the other end dies; another one still has the socket: all messages, then the end."""
    ours, theirs = socket.socketpair()
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        Connection(theirs).send({"last": "words"})
        os.read(ready, 1)
        os._exit(0)
    connection = Connection(ours, watch_process(pid))
    os.write(go, b"x")
    os.waitpid(pid, 0)  # and `theirs` is still open here
    message = connection.receive()
    assert message is not None and message.body == {"last": "words"}
    assert connection.receive() is None
    connection.close()
    theirs.close()
    os.close(ready)
    os.close(go)


def test_a_trainers_end_shows_that_was_before_anybody_watched() -> None:
    """Its id may be another process's by now: that one's life means nothing, nor does the open socket."""
    ours, theirs = socket.socketpair()
    Connection(theirs).send({"last": "words"})
    connection = Connection(ours, watch_parent(os.getpid()))  # which is not the parent of this process
    message = connection.receive()
    assert message is not None and message.body == {"last": "words"}
    assert connection.receive() is None
    connection.close()
    theirs.close()


def through(value: Any) -> Any:
    """``value`` as the writer process gets it."""
    packed = pickled_state.pack(value, "a value")
    fd = pickled_state.write_tensors(packed)
    try:
        return pickled_state.unpack(packed.data, pickled_state.map_memory(fd, packed.size_bytes))
    finally:
        os.close(fd)


def test_sharded_tensors_arrive_without_their_process_groups() -> None:
    """A DTensor keeps local tensor, placements and this rank's place in a mesh of other ranks."""
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


def sharded_through(rank: int, world_size: int) -> tuple[list[int], list[int], list[float]]:
    """A ShardedTensor of this rank as the writer process gets it."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    shard = LocalShard.from_tensor_and_offsets(torch.full((2, 3), float(rank)), [2 * rank, 0], rank)
    got = through(init_from_local_shards([shard], 2 * world_size, 3))
    assert isinstance(got, ShardedTensor)
    only = got.local_shards()[0]
    return list(got.metadata().size), only.metadata.shard_offsets, only.tensor.flatten().tolist()


def test_sharded_tensors_of_fsdp1_arrive(tmp_path: Path) -> None:
    """Global size, and the local shard with its offsets and values."""
    for rank, found in enumerate(run_ranks(2, sharded_through)):
        assert found == ([4, 3], [2 * rank, 0], [float(rank)] * 6)


def test_what_is_not_on_the_host_is_refused() -> None:
    """A tensor on a device is no staged copy."""
    with pytest.raises(WriterProcessError, match=r"the state dict .* not a staged copy"):
        pickled_state.pack({"w": torch.empty(3, device="meta")}, "the state dict")


def test_a_writer_travels_without_the_store_of_its_last_save(tmp_path: Path) -> None:
    """One that has been used is as good as new."""
    writer = dcp.FileSystemWriter(tmp_path, sync_files=False)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    got = through(writer)
    assert (got.path, got.sync_files, got.index) == (tmp_path, False, None)
    dcp.save({"w": torch.ones(2)}, storage_writer=got, no_dist=True)


def test_a_rank_that_does_not_come_to_the_meeting_is_named() -> None:
    """In time, on rank 0."""
    with pytest.raises(CollectiveTimeoutError, match="rank 1 has not started its writer process") as caught:
        meet(PrefixStore("m", HashStore()), 0, 2, timeout_seconds=0.2, check=lambda: None)
    assert caught.value.facts["ranks"] == [1]


@contextlib.contextmanager
def writer_of(rank: int, port: int, fds: list[int]) -> Iterator[tuple[Connection, Any]]:
    """The writer process of one of two ranks, and what its trainer has of it; told where the two meet."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", "dcp.background.process.main", str(theirs.fileno())]
        process = subprocess.Popen(
            [*command, str(os.getpid()), "0"], pass_fds=[theirs.fileno()], env=child_environment()
        )
    trainer = Connection(ours)
    trainer.send(
        {
            "kind": "hello",
            "version": __version__,
            "rank": rank,
            "world_size": 2,
            "timeout_seconds": DEFAULT_TIMEOUT_SECONDS,
        }
    )
    trainer.send({"kind": "join", "address": vars(Address("127.0.0.1", port, True))}, fds)
    try:
        yield trainer, process
    finally:
        process.kill()
        process.wait()


@pytest.mark.exhaustive
def test_a_writer_ends_with_its_trainer_while_it_waits_for_the_other_writers() -> None:
    """They may never come, and there is no save to do with them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with writer_of(0, port, [listener.fileno()]) as (trainer, process):
            store = own_store(Address("127.0.0.1", port, True), None, 240.0)
            until(lambda: store.check(["meeting/alive/0"]), "the writer's coming to the meeting")
            trainer.close()
            assert process.wait(240.0) == 0


@pytest.mark.exhaustive
def test_a_refused_connection_to_where_writers_meet_is_final() -> None:
    """Its host listened before anybody was told, so that it is gone: the save fails without a wait for it."""
    with refusing_port() as port, writer_of(1, port, []) as (trainer, _):
        trainer.send(
            {
                "kind": "save",
                "serial": 1,
                "go": True,
                "place": "somewhere",
                "together": True,
                "on_columns": True,
                "timeout_seconds": DEFAULT_TIMEOUT_SECONDS,
                "progress": False,
                "refused": plain_error(CheckpointError("not reached")),
            }
        )
        message = trainer.receive()
        assert message is not None and message.body["broken"]
        error = error_from_data(message.body["error"], 1)
        assert "could not reach that of rank 0" in str(error)
        trainer.close()


FAILED = error_to_data(failure_of("plan", {1: ReplicaMismatchError("differ", fqn="w")}, 0, None))
LATE = error_to_data(failure_of("write", {0: StorageError("no .metadata", committed=True)}, 0, None))
"""The checkpoint is there, and something of it is not."""
UNHEARD = error_to_data(CheckpointError("late", committed=True))
"""It is there, and not every rank has heard of it."""


@pytest.mark.parametrize(
    ("endings", "together", "expected"),
    [
        ([Ending(saved=True, save_id="a"), Ending(saved=True, save_id="a")], True, (None, False)),
        ([Ending(saved=True, save_id="a"), Ending(died="was killed")], True, (None, True)),
        ([Ending(died="was killed"), Ending(saved=True, save_id="a")], True, (None, True)),
        ([Ending(died="was killed"), Ending(error=FAILED, broken=True)], True, ("WriterProcessError", True)),
        ([Ending(error=FAILED), Ending(error=FAILED)], True, ("ReplicaMismatchError", False)),
        ([Ending(saved=True, save_id="a"), Ending(died="was killed")], False, ("WriterProcessError", True)),
        ([Ending(error=UNHEARD, broken=True), Ending(died="x")], True, (None, True)),
        ([Ending(error=LATE), Ending(error=LATE)], True, ("StorageError", False)),
        ([Ending(error=LATE), Ending(died="x")], True, ("StorageError", True)),
    ],
)
def test_all_ranks_make_the_same_of_all_endings(
    endings: list[Ending], together: bool, expected: tuple[str | None, bool]
) -> None:
    """One rank that knows of the commit decides; a death comes before what followed from it."""
    known = {rank: Ending.decode(ending.encode()) for rank, ending in enumerate(endings)}
    for rank in known:
        found = verdict(known, rank, together=together)
        error_class, restart = expected
        assert found.restart is restart
        if error_class is None:
            assert found.error is None
        else:
            names = {cls.__name__ for cls in type(found.error).__mro__}
            assert {"RankFailedError", error_class} <= names
