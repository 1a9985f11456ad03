"""Writers whose trainer or peers are gone. Internal: only a process by itself can be left so."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp.background.error_codec import error_from_data, plain_error
from dcp.background.process.child import child_environment
from dcp.background.process.rendezvous import Address, own_store
from dcp.background.process.wire import Connection
from dcp.errors import CheckpointError
from dcp.ranks.exchanges import DEFAULT_TIMEOUT_SECONDS
from dcp.version import __version__
from tests.support.ports import refusing_port
from tests.support.processes import lives
from tests.support.programs import Program

TIMEOUT_SECONDS = 240.0


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Whether something is so within two minutes."""
    deadline = time.monotonic() + 120.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


_FORKED = """
import os, signal, sys, torch, dcp
from tests.support.processes import children
sys.path.insert(0, sys.argv[1])  # where a sitecustomize keeps the writer from looking at its trainer
future = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1] + "/1", no_dist=True,
                        async_checkpointer_type=dcp.AsyncCheckpointerType.PROCESS)
(writer,) = children(os.getpid())
forked = os.fork()
if forked == 0:
    signal.pause()
open(sys.argv[1] + "/pids", "w").write(f"{writer} {forked}")
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
