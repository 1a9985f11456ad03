"""Real crashes and real full disks, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dcp.errors import StorageError
from dcp.storage.stores import PosixStore
from tests.support.programs import Program

MIB = 1 << 20


def start(
    code: str, *arguments: object, prefix: tuple[str, ...] = (), finalizes: bool = False
) -> Program | subprocess.Popen[str]:
    """A Python process that runs ``code``."""
    pipe, command = subprocess.PIPE, ["-c", code, *map(str, arguments)]
    if not prefix:
        return Program(*command, stdout=pipe, stdin=pipe, finalizes=finalizes)
    return subprocess.Popen([*prefix, sys.executable, *command], stdout=pipe, stdin=pipe, text=True)


PUBLISH = """
import os, signal, sys
from dcp.storage.stores import PosixStore
root, kill_at, size, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
seen = 0
def observe(step, name):
    global seen
    seen += 1
    if seen == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
store = PosixStore(root, observe)
expected = None if mode == "create" else store.version("m")
store.publish("m", b"N" * size, durable=True, expected=expected)
"""


@pytest.mark.parametrize("mode", ["create", "replace"])
@pytest.mark.parametrize("size", [1000, 9 * MIB])
def test_publish_killed_at_every_step(tmp_path: Path, mode: str, size: int) -> None:
    """SIGKILL before any step of a publish leaves the old or the new content, and the next publish works."""
    outcomes = []
    for kill_at in range(1, 30):
        store = PosixStore(tmp_path / str(kill_at))
        store.make_root()
        old = b"old" if mode == "replace" else None
        if old:
            store.publish("m", old, durable=False)
        process = start(PUBLISH, store.url, kill_at, size, mode)
        process.communicate(timeout=240)
        current = store.read("m", limit_bytes=1 << 30) if store.stat("m") else None
        assert current in (old, b"N" * size)
        left = [info.name for info in store.list() if info.name != "m"]
        assert all(name.startswith(".tmp-") for name in left)
        store.publish("m", b"next", durable=True, expected=store.version("m"))
        assert store.read("m", limit_bytes=9) == b"next"
        outcomes.append(current == b"N" * size)
        if process.returncode == 0:
            assert not left
            break
        assert process.returncode == -signal.SIGKILL
    assert process.returncode == 0
    # Old before the one instant, new from then on, and both were seen.
    assert outcomes == sorted(outcomes)
    assert {False, True} == set(outcomes)
    assert len(outcomes) >= 6


HOLD = """
import sys
from dcp.storage.stores import PosixStore
with PosixStore(sys.argv[1]).lock(timeout_seconds=240):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    """A lock excludes other processes while its holder lives, and is free as soon as that one is killed."""
    holder = start(HOLD, tmp_path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    store = PosixStore(tmp_path)
    with pytest.raises(StorageError) as caught, store.lock(timeout_seconds=0.1):
        pass
    assert caught.value.timeout_seconds == 0.1
    holder.kill()
    holder.communicate()
    with store.lock(timeout_seconds=240):
        assert store.list() == []
    assert list(tmp_path.iterdir()) == []


RACE = """
import os, sys, time
from dcp.errors import CheckpointConflictError
from dcp.storage.stores import PosixStore
store = PosixStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    store.publish("m", sys.argv[2].encode(), durable=True, expected=None)
except CheckpointConflictError:
    print("lost")
else:
    print("won")
"""


def test_processes_race_to_publish(tmp_path: Path) -> None:
    """Of eight processes that create one name, exactly one wins and the others know that they lost."""
    processes = [start(RACE, tmp_path, n) for n in range(8)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert sorted(said) == ["lost\n"] * 7 + ["won\n"]
    assert PosixStore(tmp_path).read("m", limit_bytes=9) == b"%d" % said.index("won\n")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


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
import resource, sys, time
from dcp.errors import StorageFullError
from dcp.storage.stores import PosixStore
root, act = sys.argv[1:]
pwrites = 0

def observe(step, name):
    # Only the second write of the file fails, and late.
    global pwrites
    pwrites += step == "pwrite"
    limit = resource.RLIM_INFINITY
    if pwrites == 2:
        time.sleep(0.3)
        limit = 10 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

handle = PosixStore(root, observe).create("data.bin", durable=True)
handle.write(bytes(17 << 20))
if act != "finish at once":
    while handle._failure is None:
        time.sleep(0.01)
try:
    handle.write(b"a small one") if act == "write" else handle.finish()
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


def in_mount(kind: str, options: str, folder: Path) -> tuple[str, ...]:
    """A command prefix that runs the rest with a file system mounted for that process alone."""
    return ("unshare", "-m", "sh", "-c", f'mount -t {kind} -o {options} none {folder} && exec "$@"', "sh")


def can_mount() -> bool:
    """Whether this user may mount a small file system of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*in_mount("tmpfs", "size=1m", Path(folder)), "true"]
        try:
            return subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0
        except FileNotFoundError:
            return False


MOUNTS = can_mount()


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("kind", ["file size limit", "small disk"] if MOUNTS else ["file size limit"])
def test_full_disk(tmp_path: Path, kind: str, durable: bool) -> None:
    """No space is a StorageFullError with path and operation; abort frees it, and the old content stays."""
    prefix = in_mount("tmpfs", "size=25m", tmp_path) if kind == "small disk" else ()
    process = start(FULL, tmp_path, 0 if prefix else 25 * MIB, durable, 0, prefix=prefix)
    assert process.communicate(timeout=240)[0] == "fine\n"


@pytest.mark.parametrize("act", ["write", "finish", "finish at once"])
def test_background_error_is_not_lost(tmp_path: Path, act: str) -> None:
    """One failed write in the background fails the next call, though everything after it would succeed."""
    assert start(ONCE, tmp_path, act).communicate(timeout=240)[0] == "fine\n"


@pytest.mark.parametrize("kind", ["file size limit", "small disk"] if MOUNTS else ["file size limit"])
def test_full_disk_shows_at_create(tmp_path: Path, kind: str) -> None:
    """An expected size that does not fit is refused before anything is written, and leaves no file."""
    prefix = in_mount("tmpfs", "size=25m", tmp_path) if kind == "small disk" else ()
    process = start(FULL, tmp_path, 0 if prefix else 25 * MIB, True, 100 * MIB, prefix=prefix)
    assert process.communicate(timeout=240)[0] == "fine\n"


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"] if MOUNTS else ["default"])
def test_file_system_without_direct_io(tmp_path: Path, kind: str) -> None:
    """Where the file system knows no O_DIRECT (ramfs never does) durable files are written all the same."""
    prefix = in_mount(kind, "size=100m", tmp_path) if MOUNTS else ()
    process = start(REFUSED, tmp_path, prefix=prefix)
    assert process.communicate(timeout=240)[0] == "fine\n"


INTERRUPTED = """
import sys
from dcp.storage.stores import PosixStore
handle = PosixStore(sys.argv[1]).create("data.bin", durable=True)
handle.write(bytes(30 << 20))
print("writing", flush=True)
"""


def test_exit_with_an_open_file(tmp_path: Path) -> None:
    """A process that ends without finishing its file ends, without waiting for a thread for ever."""
    began = time.monotonic()
    process = start(INTERRUPTED, tmp_path, finalizes=True)
    assert process.communicate(timeout=240)[0] == "writing\n"
    assert process.returncode == 0
    assert time.monotonic() - began < 240
    assert os.listdir(tmp_path) == ["data.bin"]  # noqa: PTH208
