"""Real crashes and real full disks, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dcp.errors import StorageError
from dcp.storage.stores import PosixStore
from tests.support.crashes import Child, in_lab, kill_at_each_step

MIB = 1 << 20


def _publish_new(folder: Path, observe: Any, size: int = 1000) -> None:
    store = PosixStore(folder, observe)
    store.make_root()
    store.publish("m", b"N" * size, durable=True, expected=PosixStore(folder).version("m"))


def _publish_large(folder: Path, observe: Any) -> None:
    _publish_new(folder, observe, 9 * MIB)


def _seen_after_kill(folder: Path, operation: str, killed: bool) -> tuple[str, bytes, list[str], bool]:
    store = PosixStore(folder)
    store.make_root()
    current = store.read("m", limit_bytes=1 << 30)[:3] if store.stat("m") else b""
    left = [info.name for info in store.list() if info.name != "m"]
    store.publish("m", b"next", durable=True, expected=store.version("m"))
    assert store.read("m", limit_bytes=9) == b"next"
    return operation, current, left, killed


@pytest.mark.parametrize(
    ("act", "old"), [(_publish_new, b""), (_publish_new, b"old"), (_publish_large, b"old")]
)
def test_publish_killed_at_every_step(tmp_path: Path, old: bytes, act: Any) -> None:
    """SIGKILL before any step leaves the old or the new content, one instant between, and no lock."""
    before = tmp_path / "before"
    before.mkdir()
    if old:
        (before / "m").write_bytes(old)
    seen = in_lab(kill_at_each_step, before, tmp_path / "runs", act, _seen_after_kill)
    contents = [content for _, content, _, _ in seen]
    assert contents == sorted(contents, key=lambda content: content == b"NNN")
    assert set(contents) == {old, b"NNN"}
    assert all(name.startswith(".tmp-") for _, _, left, _ in seen for name in left)
    assert [killed for *_, killed in seen] == [True] * (len(seen) - 1) + [False]
    assert len(seen) >= 6 and seen[-1][2] == []


def _hold_until_killed(folder: Path, ready: Path) -> None:
    with PosixStore(folder).lock(timeout_seconds=240):
        ready.touch()
        signal.pause()


def lock_of_a_killed_process(folder: Path) -> float:
    """Who waits for the lock of a living process gives up; that of a killed one is free at once."""
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
    """It excludes others while its holder lives, says how long was waited, and leaves nothing behind."""
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
    """Nor its buffers: it is told, writes files of its own, and the parent's are whole."""
    _assert_fine(FORKED, tmp_path)
