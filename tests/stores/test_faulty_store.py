"""The fault-injecting store does what it is told, where it is told."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dcp.errors import StorageFullError
from dcp.storage.stores import MemoryStore, PosixStore
from tests.support.faulty_store import Fault, FaultInjectingStore, Operation

FULL = StorageFullError("injected", path="x", op="write")


def test_log_and_counts(tmp_path: Path) -> None:
    """Every operation is logged in order with name and size, the inner store's own calls are not."""
    store = FaultInjectingStore(PosixStore(tmp_path))
    store.make_root()
    with store.create("a", durable=False) as handle:
        handle.write(b"12345")
    with store.open_read("a") as reader:
        reader.pread(2, 1)
    version = store.publish("m", b"1", durable=True)
    assert store.version("m") == version
    with store.lock(timeout_seconds=1):
        store.list()
    store.stat("a")
    store.read("m", limit_bytes=1)
    store.delete("a")
    store.sync()
    store.remove_root()
    assert [(o.op, o.name, o.size_bytes) for o in store.log] == [
        *(("make_root", "", 0), ("create", "a", 0), ("write", "a", 5), ("finish", "a", 5)),
        *(("open_read", "a", 0), ("preadv", "a", 2), ("publish", "m", 1), ("version", "m", 0)),
        *(("lock", "", 0), ("list", "", 0), ("stat", "a", 0), ("read", "m", 0)),
        *(("delete", "a", 0), ("sync", "", 0), ("remove_root", "", 0)),
    ]
    assert [o.number for o in store.log] == list(range(1, 16))
    assert store.counts["write"] == 1


def test_errors_at_an_operation_or_from_then_on() -> None:
    """At the nth of a kind since it was added; or for files of a pattern, until it is cleared."""
    store = FaultInjectingStore(MemoryStore("nth"))
    store.publish("m", b"1", durable=False)
    store.add(Fault("publish", at=2, error=FULL))
    store.publish("m", b"2", durable=False)
    with pytest.raises(StorageFullError, match="injected"):
        store.publish("m", b"3", durable=False)
    store.publish("m", b"4", durable=False)
    store.add(Fault("*", name="*.bin", onwards=True, error=OSError(errno.EIO, "injected")))
    for _ in range(3):
        with pytest.raises(OSError, match="injected"):
            store.create("b.bin", durable=False)
    assert store.read("m", limit_bytes=1) == b"4"
    store.clear()
    store.create("b.bin", durable=False)


def test_torn_write(tmp_path: Path) -> None:
    """A torn write leaves the first bytes in the file and raises; the caller's abort removes it."""
    store = FaultInjectingStore(PosixStore(tmp_path), Fault("write", error=FULL, torn_bytes=3))
    handle = store.create("a", durable=False)
    with pytest.raises(StorageFullError):
        handle.write(b"123456")
    assert handle.position == 3
    handle.abort()
    assert store.list() == []


def test_flipped_bytes() -> None:
    """A read returns its data with one byte inverted, the stored file is untouched."""
    inner = MemoryStore("flip")
    inner.publish("m", bytes(10), durable=False)
    store = FaultInjectingStore(inner, Fault("read", flip_byte=3), Fault("preadv", flip_byte=17))
    assert store.read("m", limit_bytes=10) == bytes(3) + b"\xff" + bytes(6)
    buffers = [bytearray(4), bytearray(6)]
    with store.open_read("m") as handle:
        handle.preadv([memoryview(buffer) for buffer in buffers], 0)
        assert handle.pread(10, 0) == bytes(10)
    assert b"".join(buffers) == bytes(7) + b"\xff" + bytes(2)
    assert inner.read("m", limit_bytes=10) == bytes(10)


def test_a_hook_is_called_at_its_operation() -> None:
    """With what the operation is, and at no other."""
    seen: list[Operation] = []
    store = FaultInjectingStore(MemoryStore("hook"), Fault("sync", at=2, hook=seen.append))
    store.sync()
    assert seen == []
    store.sync()
    assert seen == [Operation(2, "sync", "", 0)]
