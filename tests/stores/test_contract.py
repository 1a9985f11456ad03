"""Every store passes the shipped contract: folders, memory, a real S3 server, and fsspec's file systems."""

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
    """The POSIX variants, whose bytes are checked without the store."""

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """Read by the file system."""
        path = Path(store.url) / name
        return path.read_bytes() if path.exists() else None

    def reopen(self, store: Store) -> Store:
        """Return a second store of the same folder."""
        return PosixStore(store.url)


class TestPosixStore(PosixContract):
    """The file system of temporary folders."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """Return a store that has made its folder."""
        store = PosixStore(tmp_path / "parent" / "root")
        store.make_root()
        return store


class TestPosixStoreWithoutFeatures(PosixContract):
    """A file system without O_DIRECT and hard links."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """Return a store with both switched off."""
        return PosixStore(tmp_path, direct_io=False, hard_links=False)

    def reopen(self, store: Store) -> Store:
        """Return a store without hard links too: the two ways of create-only must not be mixed."""
        return PosixStore(store.url, direct_io=False, hard_links=False)


class TestMemoryStore(StoreContract):
    """The memory of this process."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Yield an empty folder, and remove its files afterwards, which would last as long as the process."""
        store = MemoryStore(uuid.uuid4().hex)
        yield store
        for file in store.list():
            store.delete(file.name)

    def reopen(self, store: Store) -> Store:
        """Return the store of the same name."""
        return MemoryStore(store.url.removeprefix("memory://"))


class TestS3(StoreContract):
    """A real S3 server, whose objects are checked by another client."""

    sees_unfinished = False
    keeps_replaced = False
    raw: RawS3

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def plain_requests(cls, s3_server: Any) -> Iterator[None]:
        """Share one client between all tests: each client takes megabytes, and test instances live long."""
        with raw_s3(s3_server) as cls.raw:
            yield
        del cls.raw

    @pytest.fixture
    def store(self, s3_server: Any, s3_root: str) -> Store:
        """Return a store with a prefix of its own and the smallest part size."""
        return open_store(f"{s3_root}/step", s3_server.storage_options | {"part_bytes": 5 << 20})

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """Read by plain requests."""
        if f"step/{name}" not in self.raw.list(store.url.removesuffix("/step")):
            return None
        return self.raw.read(f"{store.url}/{name}")

    def reopen(self, store: Store) -> Store:
        """Return a pickled copy, as another process would have."""
        again: Store = pickle.loads(pickle.dumps(store))
        return again

    @pytest.mark.exhaustive  # no file is open on this machine; test_object_lifetimes.py counts connections
    def test_many_small_files(self, store: Store) -> None:
        """Many small files are written and read as in every store."""
        super().test_many_small_files(store)


class _Cloud(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's memory file system under an unknown scheme."""

    protocol = "contractcloud"


fsspec.register_implementation("contractcloud", _Cloud, clobber=True)


class TestFsspecMemory(StoreContract):
    """Any file system of fsspec, through the generic client."""

    sees_unfinished = False
    keeps_replaced = None

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Yield a folder of its own, and remove its files afterwards."""
        name = uuid.uuid4().hex
        store = open_store(f"contractcloud://{name}")
        store.make_root()
        yield store
        for file in store.list():
            store.delete(file.name)

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """Read by the file system."""
        filesystem = fsspec.filesystem("contractcloud")
        path = f"{store.url}/{name}"  # names in its memory include the scheme
        return bytes(filesystem.cat_file(path)) if filesystem.exists(path) else None

    def reopen(self, store: Store) -> Store:
        """Return another store of the same folder."""
        return open_store(store.url)


class TestFsspecLocal(StoreContract):
    """fsspec's local file system, which has no conditional writes: a weaker mode that must be requested."""

    keeps_replaced = None

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """Return a store for one writer at a time."""
        store = open_store(f"local://{tmp_path}/step", {"conditional_writes": "off"})
        store.make_root()
        return store

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """Read by the operating system."""
        path = Path(store.url.removeprefix("local://"), name)
        return path.read_bytes() if path.exists() else None

    def test_create_only_race(self, store: Store) -> None:
        """Without conditional writes a create-only write raises, unless a single writer is declared."""
        with pytest.raises(StorageError, match="conditional_writes"):
            open_store(store.url).publish("m", b"1", durable=False, expected=None)
        assert store.list() == []

    def test_compare_and_replace_loses_no_update(self, store: Store) -> None:
        """Without conditional writes a conditional replacement raises, and the object stays."""
        version = store.publish("m", b"1", durable=False)
        with pytest.raises(StorageError, match="conditional_writes"):
            open_store(store.url).publish("m", b"2", durable=False, expected=version)
        assert self.raw_read(store, "m") == b"1"
