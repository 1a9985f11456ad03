"""Any sequence of operations leaves a store equal to a dict."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dcp.storage.errors import CheckpointConflictError, CheckpointNotFoundError, StorageError
from dcp.storage.stores.base import ANY, Store, Version
from dcp.storage.stores.memory import MemoryStore
from dcp.storage.stores.posix.store import PosixStore

NAMES = st.sampled_from(["a", "b", "c.distcp", ".tmp-d"])
SIZES = st.sampled_from([0, 1, 7, 4096, 5000, 262_144, 300_000, 1 << 20])
PIECES = st.lists(
    st.builds(lambda size, value: bytes([value]) * size, SIZES, st.integers(0, 255)), max_size=4
)


class StoreAgainstDict(RuleBasedStateMachine):
    """Operations on a store, and the same ones on a dict of name to bytes."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.stale: Version = Version("never")

    @rule(name=NAMES, pieces=PIECES, durable=st.booleans(), finish=st.booleans())
    def write(self, name: str, pieces: list[bytes], durable: bool, finish: bool) -> None:
        """A data file, finished or aborted; refused where the name exists."""
        if name in self.files:
            with pytest.raises(StorageError):
                self.store.create(name, durable=durable)
            return
        handle = self.store.create(name, durable=durable)
        for piece in pieces:
            handle.write(piece)
        if finish:
            self.files[name] = b"".join(pieces)
            assert handle.finish() == len(self.files[name])
        else:
            handle.abort()

    @rule(name=NAMES, data=st.binary(max_size=9), how=st.sampled_from(["any", "new", "current", "stale"]))
    def publish(self, name: str, data: bytes, how: str) -> None:
        """Published exactly if what is expected is there."""
        current = self.store.version(name)
        expected: Any = {"any": ANY, "new": None, "current": current, "stale": self.stale}[how]
        if expected is ANY or expected == current:
            version = self.store.publish(name, data, durable=False, expected=expected)
            assert version == self.store.version(name)
            self.stale = current or self.stale
            self.files[name] = data
        else:
            with pytest.raises(CheckpointConflictError):
                self.store.publish(name, data, durable=False, expected=expected)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        """There or not, it is gone."""
        self.store.delete(name)
        self.files.pop(name, None)

    @rule(name=NAMES, offset=st.integers(0, 5000), sizes=st.lists(st.integers(0, 2000), max_size=5))
    def read_ranges(self, name: str, offset: int, sizes: list[int]) -> None:
        """Ranges inside of the file are its bytes."""
        if name not in self.files:
            with pytest.raises(CheckpointNotFoundError):
                self.store.open_read(name)
            return
        data = self.files[name]
        offset = min(offset, len(data))
        buffers = [bytearray(size) for size in sizes]
        with self.store.open_read(name) as handle:
            if offset + sum(sizes) <= len(data):
                handle.preadv([memoryview(buffer) for buffer in buffers], offset)
                assert b"".join(buffers) == data[offset : offset + sum(sizes)]

    @invariant()
    def same_files(self) -> None:
        """Names, sizes and contents agree."""
        assert [(info.name, info.size_bytes) for info in self.store.list()] == [
            (name, len(data)) for name, data in sorted(self.files.items())
        ]
        for name, data in self.files.items():
            assert self.store.read(name, limit_bytes=len(data)) == data


class PosixAgainstDict(StoreAgainstDict):
    """In a temporary folder."""

    def __init__(self) -> None:
        super().__init__()
        self.store = PosixStore(tempfile.mkdtemp())

    def teardown(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.store.url)


class MemoryAgainstDict(StoreAgainstDict):
    """In memory."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(uuid.uuid4().hex)


TestPosixAgainstDict = PosixAgainstDict.TestCase
TestMemoryAgainstDict = MemoryAgainstDict.TestCase
for case in (TestPosixAgainstDict, TestMemoryAgainstDict):
    case.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
