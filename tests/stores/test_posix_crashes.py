"""Real crashes and real full disks, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
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


FULL = """
import os, resource, sys
from dcp.errors import StorageFullError
from dcp.storage.stores import PosixStore
root, limit, durable, expected = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", int(sys.argv[4])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
store = PosixStore(root)
store.publish("m", b"old", durable=True)
handle = None
try:
    handle = store.create("data.bin", durable=durable, expected_bytes=expected or None)
    if expected:
        try:
            os.close(os.open(root + "/m", os.O_WRONLY | os.O_DIRECT))
        except OSError:
            pass  # no reservation without O_DIRECT
        else:
            sys.exit("the reservation was not refused")
    for _ in range(60):
        handle.write(bytes(1 << 20))
    handle.finish()
except StorageFullError as error:
    assert error.path == store.path_of("data.bin"), error.path
    assert error.op and error.errno and "free space" in str(error), error
    if handle is not None:
        for act in (lambda: handle.write(b"more"), handle.finish):
            try:
                act()
            except StorageFullError:
                continue
            sys.exit("a failed handle went on")
        handle.abort()
else:
    sys.exit("a full disk went unnoticed")
try:
    store.publish("m", bytes(60 << 20), durable=durable)
except StorageFullError:
    pass
else:
    sys.exit("a full disk went unnoticed by publish")
assert [info.name for info in store.list()] == ["m"], store.list()
assert store.read("m", limit_bytes=3) == b"old"
store.publish("m", b"new", durable=durable)
print("fine")
"""

ONCE = """
import resource, sys, threading
from dcp.errors import StorageFullError
from dcp.storage.stores import PosixStore
root, act = sys.argv[1:]
pwrites, late = 0, threading.Event()

def observe(step, name):
    # Only the second write of the file fails, and late.
    global pwrites
    pwrites += step == "pwrite"
    limit = resource.RLIM_INFINITY
    if pwrites == 2:
        late.wait(60)
        limit = 10 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

handle = PosixStore(root, observe).create("data.bin", durable=True)
handle.write(bytes(17 << 20))
late.set()
try:
    while act == "write":
        handle.write(b"a small one")
    handle.finish()
except StorageFullError as error:
    print("fine" if error.op == "pwrite" else error)
"""

REFUSED = """
import sys
from dcp.storage.stores import PosixStore
store = PosixStore(sys.argv[1])
data = bytes(range(256)) * (90 << 10) + b"tail"
with store.create("data.bin", durable=True, expected_bytes=len(data)) as handle:
    handle.write(data)
assert store.read("data.bin", limit_bytes=1 << 30) == data
print("fine")
"""

INTERRUPTED = """
import sys
from dcp.storage.stores import PosixStore
handle = PosixStore(sys.argv[1]).create("data.bin", durable=True)
handle.write(bytes(30 << 20))
print("fine")
"""


def in_mount(kind: str, options: str, folder: Path) -> tuple[str, ...]:
    """A command prefix that runs the rest with a file system mounted for that process alone."""
    return ("unshare", "-m", "sh", "-c", f'mount -t {kind} -o {options} none {folder} && exec "$@"', "sh")


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        command = [*in_mount("tmpfs", "size=1m", Path(folder)), "true"]
        try:
            return subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0
        except FileNotFoundError:
            return False


MOUNTS = _can_mount()


def _assert_fine(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> None:
    command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize(("durable", "expected_bytes"), [(False, 0), (True, 100 * MIB)])
@pytest.mark.parametrize("kind", ["file size limit", "small disk"] if MOUNTS else ["file size limit"])
def test_a_full_disk_is_told(tmp_path: Path, kind: str, durable: bool, expected_bytes: int) -> None:
    """No space is a StorageFullError with path and operation, at once where the size was said; abort frees
    it, and the old content stays."""
    prefix = in_mount("tmpfs", "size=25m", tmp_path) if kind == "small disk" else ()
    _assert_fine(FULL, tmp_path, 0 if prefix else 25 * MIB, durable, expected_bytes, prefix=prefix)


@pytest.mark.parametrize("act", ["write", "finish"])
def test_an_error_in_the_background_is_not_lost(tmp_path: Path, act: str) -> None:
    """One failed write in the background fails the next call, though everything after it would succeed."""
    _assert_fine(ONCE, tmp_path, act)


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"] if MOUNTS else ["default"])
def test_a_file_system_without_direct_io(tmp_path: Path, kind: str) -> None:
    """Where the file system knows no O_DIRECT (ramfs never does) durable files are written all the same."""
    _assert_fine(REFUSED, tmp_path, prefix=in_mount(kind, "size=100m", tmp_path) if MOUNTS else ())


def test_a_process_ends_with_an_open_file(tmp_path: Path) -> None:
    """Without finishing it, and without waiting for its thread for ever."""
    _assert_fine(INTERRUPTED, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data.bin"]


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
