from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from dcp.demo.s3_server import S3Server
from dcp.storage.errors import StorageError
from dcp.storage.stores.base import Store
from dcp.storage.stores.contract import StoreContract
from dcp.storage.stores.objects.store import FsspecStore
from tests.support.s3 import RawS3, raw_s3


class TestS3(StoreContract):
    """On a real S3 server; what was written is read back past our own code."""

    sees_unfinished = False
    keeps_replaced = False
    raw: RawS3

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def plain_requests(cls, s3_server: S3Server) -> Iterator[None]:
        """One client for all tests: each takes megabytes, and a test's instance outlives the test."""
        with raw_s3(s3_server) as cls.raw:
            yield
        del cls.raw

    @pytest.fixture
    def store(self, s3_server: S3Server, s3_root: str) -> Store:
        """A prefix of its own, and uploads in the smallest parts."""
        return FsspecStore(f"{s3_root}/step", s3_server.storage_options | {"part_bytes": 5 << 20})

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """By plain requests."""
        if f"step/{name}" not in self.raw.list(store.url.removesuffix("/step")):
            return None
        return self.raw.read(f"{store.url}/{name}")

    def reopen(self, store: Store) -> Store:
        """As another process gets it."""
        again: Store = pickle.loads(pickle.dumps(store))
        return again


class TestMemoryFileSystem(StoreContract):
    """fsspec's own memory file system, through the generic client."""

    sees_unfinished = False
    keeps_replaced = None

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """A folder of its own, removed afterwards."""
        name = uuid.uuid4().hex
        store = FsspecStore(f"memory://{name}")
        store.make_root()
        yield store
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """By the file system itself."""
        filesystem = fsspec.filesystem("memory")
        path = f"{store.url.removeprefix('memory:/')}/{name}"
        return bytes(filesystem.cat_file(path)) if filesystem.exists(path) else None

    def reopen(self, store: Store) -> Store:
        """Another object for the same folder."""
        return FsspecStore(store.url)


class TestLocalFileSystem(StoreContract):
    """fsspec's local file system, which compares nothing: the weaker mode that one has to ask for."""

    keeps_replaced = None

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """For one writer at a time."""
        store = FsspecStore(f"file://{tmp_path}/step", {"conditional_writes": "off"})
        store.make_root()
        return store

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """By the operating system."""
        path = Path(store.url.removeprefix("file://"), name)
        return path.read_bytes() if path.exists() else None

    def test_create_only_race(self, store: Store) -> None:
        """Not promised: without conditional writes there may be one writer only, if that is asked for."""
        with pytest.raises(StorageError, match="conditional_writes"):
            FsspecStore(store.url).publish("m", b"1", durable=False, expected=None)
        assert store.list() == []

    def test_compare_and_replace_loses_no_update(self, store: Store) -> None:
        """As above: a replacement that compares is refused, and what is there stays."""
        version = store.publish("m", b"1", durable=False)
        with pytest.raises(StorageError, match="conditional_writes"):
            FsspecStore(store.url).publish("m", b"2", durable=False, expected=version)
        assert self.raw_read(store, "m") == b"1"
