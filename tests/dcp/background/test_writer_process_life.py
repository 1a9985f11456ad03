"""The writer process through what befalls it: signals, trainers that go, saves that it cannot take in."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.background.error_codec import Verdict, error_from_data, plain_error
from dcp.background.future import SaveFuture
from dcp.background.process import child
from dcp.background.process.rendezvous import Address, own_store
from dcp.background.process.wire import Connection
from dcp.background.process.writer import ProcessWriter
from dcp.background.results import end_future
from dcp.background.session import AsyncSession
from dcp.engines import save_engine
from dcp.ranks.exchanges import DEFAULT_TIMEOUT_SECONDS
from dcp.saving.engine import SaveOrder
from dcp.saving.options import SaveOptions
from dcp.storage.errors import CheckpointError, WriterProcessError
from dcp.storage.stores import PosixStore
from dcp.version import __version__
from tests.support.gates import FileGate, open_gated
from tests.support.ports import refusing_port
from tests.support.processes import lives, mapped_files
from tests.support.programs import Program
from tests.support.user_storage import ItemReader, ItemWriter, PlainLoadPlanner, PlainSavePlanner
from tests.support.writer_process import TIMEOUT_SECONDS, pid_of

PROCESS = dcp.AsyncCheckpointerType.PROCESS


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Whether something is so within two minutes."""
    deadline = time.monotonic() + 120.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_sigterm_to_all_processes_costs_no_save(session: AsyncSession, tmp_path: Path) -> None:
    """Not the one under way, nor the last one, which training gives after it."""
    gate = FileGate(tmp_path / "gate")
    held = dcp.FileSystemWriter(tmp_path / "1", open_store=partial(open_gated, gate=gate))
    under_way = session.save({"w": torch.ones(3)}, storage_writer=held)
    gate.wait_until_reached()
    pid = pid_of(session)
    os.kill(pid, signal.SIGTERM)
    gate.open()
    under_way.result(TIMEOUT_SECONDS)
    for number in (2, 3):
        os.kill(pid, signal.SIGTERM)
        writer = dcp.FileSystemWriter(tmp_path / str(number))
        session.save({"w": torch.full((3,), number)}, storage_writer=writer).result(TIMEOUT_SECONDS)
    assert pid_of(session) == pid
    got = {"w": torch.zeros(3, dtype=torch.int64)}
    dcp.load(got, checkpoint_id=tmp_path / "3", no_dist=True)
    assert got["w"].tolist() == [3, 3, 3]


_DYING = """
import os, signal, sys, torch, dcp
from dcp.background.session import AsyncSession
session = AsyncSession(no_dist=True, kind=dcp.AsyncCheckpointerType.PROCESS, timeout_seconds=240.0)
first = session.save({"w": torch.zeros(3)}, storage_writer=dcp.FileSystemWriter(sys.argv[1] + "/1"))
first.result(240)
pid = session._worker.pid
os.kill(pid, signal.SIGSTOP)
session.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(sys.argv[1] + "/2"))
os.kill(pid, signal.SIGTERM)
open(sys.argv[1] + "/pid", "w").write(str(pid))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_save_still_in_the_socket_outlives_sigterm_and_its_trainer(tmp_path: Path) -> None:
    """A launcher ends all processes while the writer has not yet read what it was given last."""
    # no pipes: the stopped writer would hold them open
    dying = Program("-c", _DYING, tmp_path)
    assert dying.wait(240) == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGCONT)
    assert becomes_true(lambda: not Path(f"/proc/{pid}").exists())
    got = {"w": torch.zeros(3)}
    dcp.load(got, checkpoint_id=tmp_path / "2", no_dist=True)
    assert got["w"].tolist() == [1, 1, 1]


_FORKED = """
import os, signal, sys, time, dcp
from dcp.background.session import AsyncSession
sys.path.insert(0, sys.argv[1])  # where a sitecustomize keeps the writer from looking at its trainer
session = AsyncSession(no_dist=True, kind=dcp.AsyncCheckpointerType.PROCESS, start=True)
forked = os.fork()
if forked == 0:
    signal.pause()
open(sys.argv[1] + "/pids", "w").write(f"{session._worker.pid} {forked}")
os.kill(os.getpid(), signal.SIGKILL)
"""

_HELD = """
import os, time
while not os.path.exists({gate!r}):
    time.sleep(0.01)
"""


@pytest.mark.exhaustive
def test_a_writer_ends_though_its_trainer_died_before_and_left_a_fork(tmp_path: Path) -> None:
    """Such as a data loader's worker, which holds the writer's socket open for as long as it lives."""
    gate = tmp_path / "gate"
    (tmp_path / "sitecustomize.py").write_text(_HELD.format(gate=str(gate)))
    assert Program("-c", _FORKED, tmp_path).wait(240) == -signal.SIGKILL
    writer, forked = map(int, (tmp_path / "pids").read_text().split())
    gate.touch()
    try:
        assert becomes_true(lambda: not lives(writer))
        assert lives(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_writer_that_does_not_understand_its_trainer_ends(tmp_path: Path) -> None:
    """Whatever it fails by: it would never hear of another save, and nobody of its own."""
    own = AsyncSession(no_dist=True, kind=PROCESS, timeout_seconds=TIMEOUT_SECONDS, start=True)
    assert isinstance(own._worker, ProcessWriter) and own._worker._child is not None
    own._worker._child.send({"kind": "join", "address": {"no": "such"}})
    future = own.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "1"))
    with pytest.raises(WriterProcessError, match="ended"):
        future.result(TIMEOUT_SECONDS)
    own.close(240)


@contextlib.contextmanager
def writer_of(rank: int, port: int, fds: list[int]) -> Iterator[tuple[Connection, Any]]:
    """The writer process of one of two ranks, and what its trainer has of it; told where the two meet."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = child._popen(theirs, 0)
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


def test_a_writer_ends_with_its_trainer_while_it_waits_for_the_other_writers() -> None:
    """They may never come, and there is no save to do with them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with writer_of(0, port, [listener.fileno()]) as (trainer, process):
            store = own_store(Address("127.0.0.1", port, True), None, TIMEOUT_SECONDS)
            assert becomes_true(lambda: store.check(["meeting/alive/0"]))
            trainer.close()
            assert process.wait(TIMEOUT_SECONDS) == 0


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


def _only_in(pid: int) -> OnlyHere:
    if os.getpid() != pid:
        raise OSError("this is no place to work")
    return OnlyHere()


class OnlyHere:
    """Opens folders, and cannot be rebuilt in another process."""

    def __call__(self, path: str | os.PathLike[str]) -> PosixStore:
        """Its folder."""
        return PosixStore(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _only_in, (os.getpid(),)


def test_a_save_that_the_process_cannot_rebuild_does_not_spoil_the_next(
    session: AsyncSession, tmp_path: Path
) -> None:
    """What came with it counts: else the next save of that state would be stored under the names before."""
    session.save({"old": torch.ones(5)}, storage_writer=dcp.FileSystemWriter(tmp_path / "1")).result(240)
    state = {"new": torch.full((5,), 2.0)}
    bad = dcp.FileSystemWriter(tmp_path / "2", open_store=OnlyHere())
    with pytest.raises(WriterProcessError, match="no place to work"):
        session.save(state, storage_writer=bad).result(TIMEOUT_SECONDS)
    session.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "3")).result(TIMEOUT_SECONDS)
    got = {"new": torch.zeros(5)}
    dcp.load(got, checkpoint_id=tmp_path / "3", no_dist=True)
    assert got["new"].tolist() == [2.0] * 5


def test_large_values_reach_the_process(session: AsyncSession, tmp_path: Path) -> None:
    """Beside tensors, on both roads, and with another attempt."""
    value = os.urandom(3 << 20)
    state = {"w": torch.arange(6.0), "vocabulary": value}
    session.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "ours")).result(TIMEOUT_SECONDS)
    got = {"w": torch.zeros(6), "vocabulary": b""}
    dcp.load(got, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert got["vocabulary"] == value and got["w"].tolist() == state["w"].tolist()  # type: ignore[attr-defined]
    theirs = ItemWriter(tmp_path / "theirs")
    session.save(state, storage_writer=theirs, planner=PlainSavePlanner()).result(TIMEOUT_SECONDS)
    got = {"w": torch.zeros(6), "vocabulary": b""}
    dcp.load(got, storage_reader=ItemReader(tmp_path / "theirs"), planner=PlainLoadPlanner(), no_dist=True)
    assert got["vocabulary"] == value


def test_a_future_that_is_kept_keeps_no_staged_copy(tmp_path: Path) -> None:
    """After close the host memory is free, whoever still looks at how the save ended."""

    def mapped() -> int:
        gc.collect()
        return sum("memfd:dcp-staging" in line for line in mapped_files())

    before = mapped()
    own = AsyncSession(no_dist=True, kind=PROCESS, timeout_seconds=TIMEOUT_SECONDS)
    future = own.save({"w": torch.ones(1 << 20)}, storage_writer=dcp.FileSystemWriter(tmp_path / "1"))
    future.result(TIMEOUT_SECONDS)
    assert mapped() == before + 1
    own.close(240)
    assert mapped() <= before
    assert future.done()


@pytest.mark.parametrize("sent", [b"no pickle", pickle.dumps(OnlyHere())[:-5]], ids=["none", "cut"])
def test_metadata_that_cannot_be_read_ends_the_future(tmp_path: Path, sent: bytes) -> None:
    """Nobody waits for ever, and the error says that the checkpoint is there."""
    future = SaveFuture("x")
    options = SaveOptions()
    order = SaveOrder(save_engine(ItemWriter(tmp_path), None, options), options)
    end_future(future, order, Verdict(None, "id", False), None, sent, 0)
    with pytest.raises(WriterProcessError, match="is committed") as caught:
        future.result(0)
    assert caught.value.facts["committed"]
