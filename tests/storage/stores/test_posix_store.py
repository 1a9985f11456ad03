"""What is particular to a POSIX folder: links, odd files, durability steps, refusals of the file system."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dcp.storage.errors import CheckpointConflictError, CheckpointFormatError, StorageError
from dcp.storage.stores.base import ANY
from dcp.storage.stores.buffers import BounceBuffer, BufferPool
from dcp.storage.stores.contract import BOUNDARY_SIZES, pattern_bytes
from dcp.storage.stores.names import TEMPORARY_PREFIX
from dcp.storage.stores.posix.files import DurableFile, PosixReadHandle, write_all
from dcp.storage.stores.posix.store import PosixStore
from tests.support.processes import open_files

MIB = 1 << 20


class MisalignedPool(BufferPool):
    """Buffers one byte off, which a device with O_DIRECT refuses at the first write."""

    def _allocate(self, generation: int) -> BounceBuffer:
        buffer = BounceBuffer(self.size_bytes + 4096, generation)
        buffer.view = buffer.view[1 : self.size_bytes + 1]
        return buffer


class CountingPool(BufferPool):
    """Counts the buffers that were made."""

    allocated = 0

    def _allocate(self, generation: int) -> BounceBuffer:
        self.allocated += 1
        return super()._allocate(generation)


class ShortReads(PosixReadHandle):
    """A kernel that never returns more than 1000 bytes, as it may."""

    def _preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        rest, few = 1000, []
        for buffer in buffers:
            few.append(buffer.cast("B")[:rest])
            rest -= len(few[-1])
            if not rest:
                break
        return super()._preadv(few, offset)


class Steps(list[tuple[str, str]]):
    """An observer that records; temporary names are shortened, since they are random."""

    def __call__(self, step: str, name: str) -> None:
        """Record the step."""
        self.append((step, TEMPORARY_PREFIX if name.startswith(TEMPORARY_PREFIX) else name))


def calls_that_read(store: PosixStore, name: str) -> list[Callable[[], object]]:
    """Every way to get at a file's bytes."""
    return [
        partial(store.read, name, limit_bytes=9999),
        partial(store.open_read, name),
        partial(store.version, name),
    ]


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A checkpoint cannot read another file through a link; it is as if it were not there, or refused."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(secret)
    (root / "dangling").symlink_to(tmp_path / "new")
    store = PosixStore(root)
    assert store.list() == []
    assert store.stat("link") is None
    for call in calls_that_read(store, "link"):
        with pytest.raises(CheckpointFormatError, match="symbolic link"):
            call()
    with pytest.raises(StorageError):
        store.create("dangling", durable=False)
    store.publish("link", b"published", durable=False)
    assert secret.read_bytes() == b"secret"
    assert not (root / "link").is_symlink()
    assert not (tmp_path / "new").exists()


def test_links_are_followed_on_request(tmp_path: Path) -> None:
    """The caches of model hubs are folders of links: who trusts one can read it."""
    (tmp_path / "blob").write_bytes(b"12345")
    root = tmp_path / "root"
    root.mkdir()
    (root / "model").symlink_to("../blob")
    store = PosixStore(root, follow_links=True)
    assert store.read("model", limit_bytes=5) == b"12345"
    assert [(info.name, info.size_bytes) for info in store.list()] == [("model", 5)]


def test_root_may_be_a_link(tmp_path: Path) -> None:
    """The folder was named by the user, so a link is what he means."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = PosixStore(tmp_path / "link")
    store.make_root()
    store.publish("m", b"1", durable=True, expected=None)
    assert (tmp_path / "real" / "m").read_bytes() == b"1"


def test_odd_files_are_refused_without_hanging(tmp_path: Path) -> None:
    """A FIFO, a socket and a folder are no part of a checkpoint; a FIFO is not waited for."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    store = PosixStore(tmp_path)
    assert store.list() == []
    for name in ("fifo", "folder", "socket"):
        assert store.stat(name) is None
        for call in calls_that_read(store, name):
            with pytest.raises((CheckpointFormatError, StorageError)) as caught:
                call()
            assert caught.value.path == str(tmp_path / name)
    with pytest.raises(StorageError):
        store.delete("folder")


def test_missing_root(tmp_path: Path) -> None:
    """A folder that does not exist is empty to readers, and a typed error to writers."""
    store = PosixStore(tmp_path / "missing")
    assert store.list() == []
    assert store.stat("m") is None
    assert store.version("m") is None
    store.remove_root()
    for call in (
        partial(store.create, "a", durable=True),
        partial(store.publish, "m", b"", durable=True),
        store.sync,
        lambda: store.lock(timeout_seconds=1).__enter__(),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        assert str(tmp_path / "missing") in caught.value.path


def test_make_root_is_durable(tmp_path: Path) -> None:
    """Each new folder is synced in its parent, outermost first; an existing one costs nothing."""
    steps = Steps()
    store = PosixStore(tmp_path / "a" / "b", steps)
    store.make_root()
    assert steps == [("mkdir", "a"), ("fsync_folder", tmp_path.name), ("mkdir", "b"), ("fsync_folder", "a")]
    store.make_root()
    assert len(steps) == 4


@pytest.mark.parametrize("at", [("mkdir", "b"), ("fsync_folder", "a")])
def test_make_root_beside_who_removes_it(tmp_path: Path, at: tuple[str, str]) -> None:
    """A deletion that ends as a save of the same id begins takes the empty folder away: it is made again."""
    root, steps = tmp_path / "a" / "b", Steps()

    def observe(step: str, name: str) -> None:
        if (step, name) == at and at not in steps:
            shutil.rmtree(root.parent)
        steps(step, name)

    PosixStore(root, observe).make_root()
    assert root.is_dir() and steps.count(at) == 2


@pytest.mark.parametrize("blocker", ["file", "dangling"])
def test_make_root_on_a_file(tmp_path: Path, blocker: str) -> None:
    """Something else in the folder's place, or in its parent's, is a typed error."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    for path in (tmp_path / blocker, tmp_path / blocker / "below"):
        with pytest.raises(StorageError):
            PosixStore(path).make_root()


def test_remove_root_ignores_an_abandoned_lock_file(tmp_path: Path) -> None:
    """The lock file of a killed process does not keep an empty folder; that of a living one does."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".lock").touch()
    store = PosixStore(tmp_path / "root")
    other = PosixStore(tmp_path / "root")
    with other.lock(timeout_seconds=1):
        store.remove_root()
        assert (tmp_path / "root").is_dir()
    (tmp_path / "root" / ".lock").touch()
    store.remove_root()
    assert not (tmp_path / "root").exists()


def test_a_lock_on_a_removed_file_does_not_count(tmp_path: Path) -> None:
    """Who opened the lock file just before its holder removed it must not believe to have the lock."""
    path = tmp_path / ".lock"
    slow, holder, other = PosixStore(tmp_path), PosixStore(tmp_path), PosixStore(tmp_path)
    with holder.lock(timeout_seconds=1):
        descriptor = slow._open_lock(path)
        assert not slow._try_lock(descriptor, path)
    assert not slow._try_lock(descriptor, path)
    with other.lock(timeout_seconds=1):
        assert not slow._try_lock(descriptor, path)
    os.close(descriptor)
    with slow.lock(timeout_seconds=1):
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("durable", [False, True])
def test_order_of_steps_of_a_publish(tmp_path: Path, durable: bool) -> None:
    """Content is synced before it gets its name, and the folder after; the lock is for replacements only."""
    steps = Steps()
    store = PosixStore(tmp_path, steps)
    aside = [("create", ".tmp-"), ("pwrite", ".tmp-"), ("fsync", ".tmp-")]
    if not durable:
        aside = [("create", ".tmp-"), ("write", ".tmp-")]
    after = [("fsync_folder", tmp_path.name)] if durable else []
    version = store.publish("m", b"1", durable=durable, expected=None)
    assert steps == [*aside, ("link", "m"), ("unlink", ".tmp-"), *after]
    steps.clear()
    store.publish("m", b"2", durable=durable, expected=version)
    assert steps == [*aside, ("lock", ".lock"), ("rename", "m"), *after]
    assert os.listdir(tmp_path) == ["m"]  # noqa: PTH208


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("durable", [False, True])
def test_a_publish_interrupted_anywhere_leaves_nothing_aside(tmp_path: Path, durable: bool) -> None:
    """Ctrl-C may come at any call: what is there then is nothing, or the whole file under its name."""
    store, left = PosixStore(tmp_path), 0

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if event in ("call", "return") and (left := left - 1) == 0:
            raise KeyboardInterrupt
        return interrupt

    for call in count(1):
        left = call
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            store.publish("m", b"1", durable=durable, expected=None)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(before)
        assert os.listdir(tmp_path) in ([], ["m"]), call  # noqa: PTH208
        (tmp_path / "m").unlink(missing_ok=True)
    assert call > 20
    assert (tmp_path / "m").read_bytes() == b"1"


def test_steps_of_data_files(tmp_path: Path) -> None:
    """A large durable file is reserved, written in pieces and cut; a small one is one write and one sync."""
    steps = Steps()
    store = PosixStore(tmp_path, steps)
    with store.create("small", durable=True, expected_bytes=MIB) as handle:
        handle.write(bytes(1000))
        handle.write(bytes(1000))
        assert isinstance(handle, DurableFile)
        assert handle._executor is None
    assert steps == [("create", "small"), ("pwrite", "small"), ("fsync", "small")]
    steps.clear()
    with store.create("large", durable=True, expected_bytes=64 * MIB) as handle:
        handle.write(bytes(17 * MIB + 1))
    # Reserving and cutting belong to O_DIRECT, which this file system may not have.
    taken = [step for step, name in steps if name == "large"]
    assert taken in (
        ["create", "fallocate", "pwrite", "pwrite", "pwrite", "ftruncate", "fsync"],
        ["create", "pwrite", "pwrite", "pwrite", "fsync"],
    )
    assert (tmp_path / "large").stat().st_size == 17 * MIB + 1


@pytest.mark.parametrize("size", BOUNDARY_SIZES)
def test_refused_direct_write_falls_back(tmp_path: Path, size: int) -> None:
    """A device that refuses O_DIRECT only at the write is served through the page cache."""
    path = tmp_path / "data.bin"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    data = pattern_bytes(size)
    with DurableFile(path, descriptor, None, MisalignedPool(2, 8 * MIB)) as handle:
        handle.write(data)
    assert path.read_bytes() == data


def test_a_file_takes_two_buffers_and_returns_them(tmp_path: Path) -> None:
    """However long a file is, one buffer is filled while another is written, and both come back."""
    pool = CountingPool(count=4, size_bytes=64 << 10)
    descriptor = os.open(tmp_path / "data.bin", os.O_WRONLY | os.O_CREAT)
    with DurableFile(tmp_path / "data.bin", descriptor, None, pool) as handle:
        for _ in range(40):
            handle.write(bytes(100_000))
    assert 1 <= pool.allocated <= 2
    assert all(pool.try_take() for _ in range(4))


def test_partial_reads_are_continued(tmp_path: Path) -> None:
    """Reads that return less than asked go on where they stopped, within a buffer and at its end."""
    data = pattern_bytes(20_000)
    (tmp_path / "data.bin").write_bytes(data)
    sizes = [0, 999, 1, 1000, 0, 1001, 5000, 3, 0, 7000, 0]
    memory = [bytearray(size) for size in sizes]
    with ShortReads(tmp_path / "data.bin", os.open(tmp_path / "data.bin", os.O_RDONLY)) as handle:
        handle.preadv([memoryview(part) for part in memory], 33)
    assert b"".join(memory) == data[33 : 33 + sum(sizes)]


def test_short_writes_are_continued() -> None:
    """A write that a signal cuts short goes on where it stopped."""
    reader, writer = os.pipe()
    data = pattern_bytes(8 * MIB)
    received = bytearray()

    def drain() -> None:
        while part := os.read(reader, 50_000):
            received.extend(part)

    thread = threading.Thread(target=drain)
    thread.start()
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        write_all(
            writer, [memoryview(data)[:5], memoryview(b""), memoryview(data)[5:MIB], memoryview(data)[MIB:]]
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        os.close(writer)
        thread.join()
        os.close(reader)
    assert received == data


def test_handles_that_are_dropped_release_everything(tmp_path: Path) -> None:
    """A handle that is neither finished nor aborted leaks no descriptor, thread or buffer."""
    store = PosixStore(tmp_path)

    def descriptors() -> list[str]:
        return [path for path in open_files() if path.startswith(str(tmp_path))]

    earlier = set(threading.enumerate())
    for n in range(6):
        store.create(f"a{n}", durable=True).write(bytes(9 * MIB))
        store.create(f"b{n}", durable=False).write(b"x")
        store.publish("m", b"1", durable=False)
        store.open_read("m")
    writing = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("dcp-write") and thread not in earlier
    ]
    for thread in writing:
        thread.join(240)
    assert descriptors() == []
    assert not any(thread.is_alive() for thread in writing)


def test_without_hard_links_create_only_still_excludes(tmp_path: Path) -> None:
    """Where links are refused a create-only publish is a compare and rename under the lock."""
    steps = Steps()
    store = PosixStore(tmp_path, steps, hard_links=False)
    store.publish("m", b"1", durable=False, expected=None)
    assert [step for step, _ in steps] == ["create", "write", "lock", "rename"]
    with pytest.raises(CheckpointConflictError):
        store.publish("m", b"2", durable=False, expected=None)
    assert store.read("m", limit_bytes=9) == b"1"


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """Files are as readable as the user's other files, for a shared folder."""
    previous = os.umask(0o027)
    try:
        store = PosixStore(tmp_path / "root")
        store.make_root()
        store.create("a", durable=True).finish()
        store.publish("m", b"1", durable=False, expected=ANY)
    finally:
        os.umask(previous)
    modes = [stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) for name in ("a", "m", ".")]
    assert modes == [0o640, 0o640, 0o750]
