"""Parts of the writer process. Internal: messages, meeting and verdict, whose endings no door can order."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
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
from dcp.background.error_codec import Ending, error_from_data, error_to_data, verdict
from dcp.background.process import pickled_state
from dcp.background.process.rendezvous import Address, meet, own_store
from dcp.background.process.wire import Connection, watch_parent, watch_process
from dcp.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    ReplicaMismatchError,
    StorageError,
    WriterProcessError,
)
from dcp.ranks.failures import failure_of
from tests.support.ranks import run_ranks
from tests.support.values import raw


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


def test_a_long_message_is_sent_although_no_file_can_be_opened() -> None:
    """A trainer that has too many open files is heard all the same."""
    ours, theirs = map(Connection, socket.socketpair())
    memory = os.memfd_create("sent")
    received: list[Any] = []
    reader = threading.Thread(target=lambda: received.append(theirs.receive()))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader.start()
    filling: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (memory + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(memory))
        ours.send({"data": b"x" * 3_000_000})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in [*filling, memory]:
            os.close(fd)
    reader.join(60)
    assert received[0].body == {"data": b"x" * 3_000_000}
    ours.close()
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


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:TypedStorage:UserWarning")
def test_tensors_of_any_kind_arrive_as_they_were() -> None:
    """Shapes, strides of views, dtypes, ties, requires_grad; bytes are not in the pickle."""
    weight = torch.nn.Parameter(torch.randn(50, 40))
    value = {
        "weight": weight,
        "tied": weight,
        "transposed": torch.randn(6, 7).t(),
        "every second": torch.arange(20)[::2],
        "scalar": torch.tensor(3, dtype=torch.int8),
        "empty": torch.zeros(0, 5),
        "bf16": torch.randn(9).to(torch.bfloat16),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "bool": torch.tensor([True, False]),
        "quantized": torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8),
        "nested": [(1, "two", {"three": torch.ones(2)})],
    }
    assert len(pickled_state.pack(value, "a value").data) < 4000
    got = through(value)
    assert got["weight"].requires_grad
    assert got["weight"].data_ptr() == got["tied"].data_ptr()
    assert got["nested"][0][:2] == (1, "two")
    for name, tensor in value.items():
        if isinstance(tensor, torch.Tensor) and not tensor.is_quantized:
            assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype, name
            assert raw(got[name].detach()) == raw(tensor.detach()), name
    assert torch.equal(got["quantized"].int_repr(), value["quantized"].int_repr())  # type: ignore[attr-defined]


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


def test_trainers_agree_on_an_address_that_serves(tmp_path: Path) -> None:
    """Both learn the port of the socket that rank 0 bound; a store served on it later answers clients that
    came earlier."""
    shared = HashStore()
    found: dict[int, Any] = {}

    def one(rank: int) -> None:
        found[rank] = meet(PrefixStore("m", shared), rank, 2, timeout_seconds=240, check=lambda: None)

    other = threading.Thread(target=one, args=(1,))
    other.start()
    one(0)
    other.join()
    (address, listener), (same, nothing) = found[0], found[1]
    assert address == same == Address("127.0.0.1", listener.getsockname()[1], True)
    assert nothing is None
    values: list[bytes] = []
    early = threading.Thread(target=lambda: values.append(own_store(address, None, 240).get("key")))
    early.start()
    time.sleep(0.1)
    host = own_store(address, os.dup(listener.fileno()), 240)
    listener.close()
    host.set("key", "value")
    early.join()
    assert values == [b"value"]


def test_a_rank_that_does_not_come_to_the_meeting_is_named() -> None:
    """In time, on rank 0."""
    with pytest.raises(CollectiveTimeoutError, match="rank 1 has not started its writer process") as caught:
        meet(PrefixStore("m", HashStore()), 0, 2, timeout_seconds=0.2, check=lambda: None)
    assert caught.value.facts["ranks"] == [1]


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


def test_an_error_keeps_class_ranks_facts_and_the_traceback() -> None:
    """Of the rank that failed, across the process boundary; facts that are no plain data become text."""
    cause = ReplicaMismatchError("differ", fqn="w", odd=object())
    error = error_from_data(error_to_data(failure_of("plan", {1: cause}, 0, None)), 0)
    assert isinstance(error, dcp.RankFailedError) and isinstance(error, ReplicaMismatchError)
    assert error.ranks == [1]
    assert error.facts["fqn"] == "'w'" or error.facts["fqn"] == "w"
    assert "object object" in error.facts["odd"]
    assert any("traceback of the writer" in note for note in error.__cause__.__notes__)
