"""Details of folders: links, special files, the order of durable steps, and modes."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dcp.errors import CheckpointFormatError, StorageError
from dcp.storage.stores import PosixStore
from tests.support.bad_mount import bad_mount

MIB = 1 << 20
ASIDE = ".tmp-"


class Steps(list[tuple[str, str]]):
    """An observer that records steps, with random temporary names shortened."""

    def __call__(self, step: str, name: str) -> None:
        """Record the step."""
        self.append((step, ASIDE if name.startswith(ASIDE) else name))


def _calls_that_read(store: PosixStore, name: str) -> list[Callable[[], object]]:
    return [
        partial(store.read, name, limit_bytes=9999),
        partial(store.open_read, name),
        partial(store.version, name),
    ]


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A checkpoint cannot read another file through a link: the link is invisible or refused."""
    secret, root = tmp_path / "secret", tmp_path / "root"
    secret.write_bytes(b"secret")
    root.mkdir()
    (root / "link").symlink_to(secret)
    (root / "dangling").symlink_to(tmp_path / "new")
    store = PosixStore(root)
    assert store.list() == [] and store.stat("link") is None
    for call in _calls_that_read(store, "link"):
        with pytest.raises(CheckpointFormatError, match="symbolic link"):
            call()
    with pytest.raises(StorageError):
        store.create("dangling", durable=False)
    store.publish("link", b"published", durable=False)
    assert secret.read_bytes() == b"secret" and not (root / "link").is_symlink()
    assert not (tmp_path / "new").exists()


def test_links_are_followed_on_request_and_roots_may_be_links(tmp_path: Path) -> None:
    """Links are followed on request, as in caches of model hubs; a user's root may be a link."""
    (tmp_path / "blob").write_bytes(b"12345")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "model").symlink_to("../blob")
    store = PosixStore(tmp_path / "link", follow_links=True)
    store.make_root()
    assert store.read("model", limit_bytes=5) == b"12345"
    store.publish("m", b"1", durable=True, expected=None)
    assert [(info.name, info.size_bytes) for info in store.list()] == [("m", 1), ("model", 5)]


def test_odd_files_are_refused_without_hanging(tmp_path: Path) -> None:
    """A FIFO, a socket and a folder are not files of a checkpoint, and a FIFO does not block."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    store = PosixStore(tmp_path)
    assert store.list() == []
    for name in ("fifo", "folder", "socket"):
        assert store.stat(name) is None
        for call in _calls_that_read(store, name):
            with pytest.raises((CheckpointFormatError, StorageError)) as caught:
                call()
            assert caught.value.path == str(tmp_path / name)
    with pytest.raises(StorageError):
        store.delete("folder")


def test_a_missing_root_fails_only_writes(tmp_path: Path) -> None:
    """Reads of a missing root find nothing; writes raise a StorageError with the path."""
    store = PosixStore(tmp_path / "missing")
    assert (store.list(), store.stat("m"), store.version("m")) == ([], None, None)
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


@pytest.mark.parametrize("blocker", ["file", "dangling"])
def test_a_file_in_place_of_the_root_is_refused(tmp_path: Path, blocker: str) -> None:
    """Another kind of file in place of the root, or of its parent, is a StorageError."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    for path in (tmp_path / blocker, tmp_path / blocker / "below"):
        with pytest.raises(StorageError):
            PosixStore(path).make_root()


# -- the order of steps --------------------------------------------------------------------------------------


def test_make_root_is_durable(tmp_path: Path) -> None:
    """Each new folder is synced in its parent, outermost first; an existing folder needs no sync."""
    steps = Steps()
    store = PosixStore(tmp_path / "a" / "b", steps)
    for _ in range(2):
        store.make_root()
    assert steps == [("mkdir", "a"), ("fsync_folder", tmp_path.name), ("mkdir", "b"), ("fsync_folder", "a")]


@pytest.mark.parametrize("durable", [False, True])
def test_content_is_synced_before_its_name(tmp_path: Path, durable: bool) -> None:
    """Content is synced before it is named, and the folder afterwards; only replacements take the lock."""
    steps = Steps()
    store = PosixStore(tmp_path, steps)
    aside = [("create", ASIDE), ("pwrite", ASIDE), ("fsync", ASIDE)]
    aside = aside if durable else [("create", ASIDE), ("write", ASIDE)]
    after = [("fsync_folder", tmp_path.name)] if durable else []
    version = store.publish("m", b"1", durable=durable, expected=None)
    assert steps == [*aside, ("link", "m"), ("unlink", ASIDE), *after]
    steps.clear()
    store.publish("m", b"2", durable=durable, expected=version)
    assert steps == [*aside, ("lock", ".lock"), ("rename", "m"), *after]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_durable_files_are_synced(tmp_path: Path) -> None:
    """A durable file and its folder are synced by system calls; without durability there are none."""
    asked: list[tuple[str, str]] = []

    def note(call: str, path: Path) -> int:
        if call in ("fsync", "fdatasync", "link", "rename"):
            asked.append((call, "folder" if path.is_dir() else path.name.partition("-")[0]))
        return 0

    store = PosixStore(tmp_path)
    with bad_mount(tmp_path, note):
        for durable in (False, True):
            with store.create(f"data{durable}", durable=durable) as handle:
                handle.write(b"1")
            store.publish(f"m{durable}", b"1", durable=durable, expected=None)
    aside = f"{ASIDE}".removesuffix("-")
    assert asked == [
        ("link", aside),
        ("fsync", "dataTrue"),
        ("fsync", aside),
        ("link", aside),
        ("fsync", "folder"),
    ]


# -- handles, locks, modes -----------------------------------------------------------------------------------


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """Files follow the user's umask, as in a shared folder."""
    previous = os.umask(0o027)
    try:
        store = PosixStore(tmp_path / "root")
        store.make_root()
        store.create("a", durable=True).finish()
        store.publish("m", b"1", durable=False)
    finally:
        os.umask(previous)
    modes = [stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) for name in ("a", "m", ".")]
    assert modes == [0o640, 0o640, 0o750]
