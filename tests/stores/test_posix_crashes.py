"""Locks of killed processes, and files of forked processes, tested in separate processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcp.errors import StorageError
from dcp.storage.stores import PosixStore
from tests.support.crashes import Child, in_lab

MIB = 1 << 20


def _hold_until_killed(folder: Path, ready: Path) -> None:
    with PosixStore(folder).lock(timeout_seconds=240):
        ready.touch()
        signal.pause()


def lock_of_a_killed_process(folder: Path) -> float:
    """Time out on the lock of a live process, kill it, and take the lock at once."""
    holder = Child(_hold_until_killed, folder, folder.parent / "ready")
    while not (folder.parent / "ready").exists():
        pass
    with pytest.raises(StorageError) as caught, PosixStore(folder).lock(timeout_seconds=0.1):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    assert holder.wait().killed
    with PosixStore(folder).lock(timeout_seconds=240):
        pass
    return float(caught.value.timeout_seconds or 0)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """A lock excludes others while its holder lives, an error has the waiting time, and no file is left."""
    (tmp_path / "root").mkdir()
    assert in_lab(lock_of_a_killed_process, tmp_path / "root") == 0.1
    assert list((tmp_path / "root").iterdir()) == []


def _assert_fine(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> None:
    command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


FORKED = """
import os, sys
from dcp.storage.stores import PosixStore

store = PosixStore(sys.argv[1])
handle = store.create("parent", durable=True)
handle.write(b"p" * (20 << 20))
child = os.fork()
if child == 0:
    try:
        handle.write(b"c")
        handle.finish()
    except OSError as error:
        assert "was opened in process" in str(error), error
    else:
        sys.exit("a forked child wrote to its parent's file")
    handle.abort()
    with store.create("child", durable=True) as mine:
        mine.write(b"c" * (20 << 20))
    os._exit(0)
handle.write(b"p" * (20 << 20))
assert handle.finish() == 40 << 20
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.read("parent", limit_bytes=1 << 30) == b"p" * (40 << 20)
assert store.read("child", limit_bytes=1 << 30) == b"c" * (20 << 20)
print("fine")
"""


def test_a_fork_does_not_reach_its_parents_files(tmp_path: Path) -> None:
    """A fork cannot write to its parent's open file or buffers, and may write its own files."""
    _assert_fine(FORKED, tmp_path)
