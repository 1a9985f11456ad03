"""Every store passes the shipped contract: folders, memory, and what fsspec reaches, a real S3 server too."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dcp.errors import StorageError
from dcp.storage.stores import MemoryStore, PosixStore, Store, open_store
from dcp.storage.stores.contract import StoreContract
from tests.support.s3 import RawS3, raw_s3


class PosixContract(StoreContract):
    """What the POSIX variants share: bytes are checked past the store."""

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """By the file system."""
        path = Path(store.url) / name
        return path.read_bytes() if path.exists() else None

    def reopen(self, store: Store) -> Store:
        """A second object over the same folder."""
        return PosixStore(store.url)


class TestPosixStore(PosixContract):
    """On the disk that temporary folders are on."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """A folder that is made by the store."""
        store = PosixStore(tmp_path / "parent" / "root")
        store.make_root()
        return store


class TestPosixStoreWithoutFeatures(PosixContract):
    """As on a file system with neither O_DIRECT nor hard links."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """Both switched off."""
        return PosixStore(tmp_path, direct_io=False, hard_links=False)

    def reopen(self, store: Store) -> Store:
        """Without hard links as well: the two ways of create-only are not meant to be mixed."""
        return PosixStore(store.url, direct_io=False, hard_links=False)


class TestMemoryStore(StoreContract):
    """In this process."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """A folder of its own for each test, emptied afterwards: it would live as long as the process."""
        store = MemoryStore(uuid.uuid4().hex)
        yield store
        for file in store.list():
            store.delete(file.name)

    def reopen(self, store: Store) -> Store:
        """By name."""
        return MemoryStore(store.url.removeprefix("memory://"))


class TestS3(StoreContract):
    """On a real S3 server; what was written is read back past our own code."""

    sees_unfinished = False
    keeps_replaced = False
    raw: RawS3

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def plain_requests(cls, s3_server: Any) -> Iterator[None]:
        """One client for all tests: each takes megabytes, and a test's instance outlives the test."""
        with raw_s3(s3_server) as cls.raw:
            yield
        del cls.raw

    @pytest.fixture
    def store(self, s3_server: Any, s3_root: str) -> Store:
        """A prefix of its own, and uploads in the smallest parts."""
        return open_store(f"{s3_root}/step", s3_server.storage_options | {"part_bytes": 5 << 20})

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """By plain requests."""
        if f"step/{name}" not in self.raw.list(store.url.removesuffix("/step")):
            return None
        return self.raw.read(f"{store.url}/{name}")

    def reopen(self, store: Store) -> Store:
        """As another process gets it."""
        again: Store = pickle.loads(pickle.dumps(store))
        return again

    @pytest.mark.exhaustive  # no file is open on this machine; test_object_lifetimes.py counts connections
    def test_many_small_files(self, store: Store) -> None:
        """As everywhere."""
        super().test_many_small_files(store)


class _Cloud(MemoryFileSystem):  # type: ignore[misc]  # it comes without types
    """fsspec's own memory file system, by a scheme that the package does not know."""

    protocol = "contractcloud"


fsspec.register_implementation("contractcloud", _Cloud, clobber=True)


class TestFsspecMemory(StoreContract):
    """Any file system of fsspec's, through the generic client."""

    sees_unfinished = False
    keeps_replaced = None

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """A folder of its own, removed afterwards."""
        name = uuid.uuid4().hex
        store = open_store(f"contractcloud://{name}")
        store.make_root()
        yield store
        for file in store.list():
            store.delete(file.name)

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """By the file system itself."""
        filesystem = fsspec.filesystem("contractcloud")
        path = f"{store.url}/{name}"  # a name in its memory, scheme and all
        return bytes(filesystem.cat_file(path)) if filesystem.exists(path) else None

    def reopen(self, store: Store) -> Store:
        """Another object for the same folder."""
        return open_store(store.url)


class TestFsspecLocal(StoreContract):
    """fsspec's local file system, which compares nothing: the weaker mode that one has to ask for."""

    keeps_replaced = None

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """For one writer at a time."""
        store = open_store(f"local://{tmp_path}/step", {"conditional_writes": "off"})
        store.make_root()
        return store

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """By the operating system."""
        path = Path(store.url.removeprefix("local://"), name)
        return path.read_bytes() if path.exists() else None

    def test_create_only_race(self, store: Store) -> None:
        """Not promised: without conditional writes there may be one writer only, if that is asked for."""
        with pytest.raises(StorageError, match="conditional_writes"):
            open_store(store.url).publish("m", b"1", durable=False, expected=None)
        assert store.list() == []

    def test_compare_and_replace_loses_no_update(self, store: Store) -> None:
        """As above: a replacement that compares is refused, and what is there stays."""
        version = store.publish("m", b"1", durable=False)
        with pytest.raises(StorageError, match="conditional_writes"):
            open_store(store.url).publish("m", b"2", durable=False, expected=version)
        assert self.raw_read(store, "m") == b"1"
