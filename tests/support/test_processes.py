"""What the suite asks of processes bears that they end meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp.server.jobs.executors import subprocesses
from dcp.server.monitoring import processes as monitoring
from tests.support import crashes
from tests.support.forking import PRELOADED, forkserver_context
from tests.support.processes import children, command_of, environment_of, lives, parent_of
from tests.support.programs import Program

LOOKS: dict[str, tuple[Callable[[int], Any], Any]] = {
    "lives": (lives, False),
    "parent_of": (parent_of, None),
    "children": (children, []),
    "environment_of": (environment_of, b""),
    "command_of": (command_of, ""),
    "crashes": (crashes._is_alive, False),
    "subprocesses, lives": (subprocesses._lives, False),
    "subprocesses, memory": (subprocesses.resident_bytes, 0),
    "monitoring": (monitoring.resident_bytes, 0),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_process_may_end_between_open_and_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is open below /proc by then says ProcessLookupError, and nothing FileNotFoundError."""
    look, gone = LOOKS[name]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    read_text, read_bytes = Path.read_text, Path.read_bytes

    def end_then_read(path: Path, *args: Any) -> bytes:
        with path.open("rb") as file:
            child.kill()
            child.wait()
            return file.read()

    monkeypatch.setattr(Path, "read_bytes", lambda path: end_then_read(path))
    monkeypatch.setattr(Path, "read_text", lambda path, *args: end_then_read(path).decode())
    try:
        assert look(child.pid) == gone
    finally:
        monkeypatch.undo()
        child.kill()
        child.communicate()
    assert Path.read_text is read_text and Path.read_bytes is read_bytes
    assert look(child.pid) == gone


def test_what_lives_is_seen() -> None:
    """Of this process and one that it starts: alive, with a parent, a command line and variables."""
    pid = os.getpid()
    assert lives(pid) and parent_of(pid)
    assert "python" in command_of(pid) and b"PATH=" in environment_of(pid)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in children(pid) and parent_of(child.pid) == pid


def test_a_process_of_a_test_has_imported_what_it_needs() -> None:
    """The fork server says nothing of what it cannot import: each process would import torch by itself."""
    look = f"import sys; sys.exit(', '.join(set({PRELOADED}) - set(sys.modules)) or 0)"
    process = forkserver_context().Process(target=exec, args=(look,))
    process.start()
    process.join()
    assert process.exitcode == 0


RUN = """
import os, signal
from tests.support.forking import end_with_run
if os.fork() == 0:
    end_with_run()
    if (hangs := os.fork()) != 0:
        print(os.getpid(), hangs, flush=True)
signal.pause()
"""


def test_a_fork_server_ends_with_a_run_that_is_killed() -> None:
    """And what it has forked does, be it that it hangs."""
    with Program("-c", RUN, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        pids = [int(word) for word in run.stdout.readline().split()]
        assert len(pids) == 2 and all(map(lives, pids))
        run.kill()
    for pid in pids:
        crashes.wait_for_end(pid)


def test_torch_has_the_threads_that_it_was_given() -> None:
    """One, of OpenMP's: it reads the variable as torch is imported, and tests/conftest.py sets it before."""
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
