"""Every store passes the shipped contract."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp.storage.stores.base import Store
from dcp.storage.stores.contract import StoreContract
from dcp.storage.stores.faults import FaultInjectingStore
from dcp.storage.stores.memory import MemoryStore
from dcp.storage.stores.posix import PosixStore

SHARED_MEMORY = Path("/dev/shm")
"""A tmpfs on Linux. Elsewhere the tests that name it run on the default folder, and prove a little less."""


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


class TestPosixStoreOnTmpfs(PosixContract):
    """On memory, where O_DIRECT is refused or has other rules."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """A folder that is removed afterwards, since it takes memory."""
        folder = tempfile.mkdtemp(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        yield PosixStore(folder)
        shutil.rmtree(folder)


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


class TestFaultInjectingStore(PosixContract):
    """Without faults the wrapper changes nothing."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """Around a POSIX store."""
        return FaultInjectingStore(PosixStore(tmp_path))
