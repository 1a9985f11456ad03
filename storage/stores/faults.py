"""Fault injection: wrap a store and count, log, fail, tear or delay operations.

Use this store to test the recovery of a backend or training framework::

    store = FaultInjectingStore(PosixStore(path), Fault("write", at=3, error=OSError(errno.EIO, "injected")))
"""

from __future__ import annotations

import fnmatch
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from dcp.storage.stores.base import (
    Buffer,
    ReadHandle,
    Store,
    WriteHandle,
    byte_view,
)

M = TypeVar("M", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class StoreCall:
    """Logged call: ``number`` counts all operations from 1; ``size_bytes`` is set for transfers.

    ``op`` is the method name: make_root, list, stat, read, open_read, preadv, create, write, finish, abort,
    version, publish, delete, lock, sync, remove_root. pread is logged as preadv.
    """

    number: int
    op: str
    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault at the ``at``-th operation (from 1) that matches ``op`` and ``name`` (shell patterns).

    With ``onwards``, also at all later matches. Order of effects: wait ``delay_seconds``, call ``hook``
    (which may kill the process), raise ``error``. A failing write first writes ``torn_bytes`` of the data.
    ``flip_byte`` inverts the byte at this position (modulo the length) in the result of a read.
    """

    op: str = "*"
    at: int = 1
    name: str = "*"
    onwards: bool = False
    error: Exception | None = None
    torn_bytes: int = 0
    delay_seconds: float = 0.0
    hook: Callable[[StoreCall], None] | None = None
    flip_byte: int | None = None


def _counted(method: M, op: str = "") -> M:
    """Return ``method`` of `Store` as a counted operation of the inner store."""

    @functools.wraps(method)
    def call(self: FaultInjectingStore, *args: Any, **options: Any) -> Any:
        name, data = (*args, "", b"")[:2] if args and isinstance(args[0], str) else ("", b"")
        self._run(op or method.__name__, name, len(data) if isinstance(data, bytes) else 0)
        return getattr(self.inner, method.__name__)(*args, **options)

    vars(call).pop("__isabstractmethod__", None)
    return cast(M, call)


class FaultInjectingStore(Store):
    """Store with injected faults around ``inner``.

    ``log`` lists all operations in order; ``counts`` holds the number by name. Faults added later count
    from then on.
    """

    def __init__(self, inner: Store, *faults: Fault) -> None:
        self.inner = inner
        self.url = inner.url
        self.read_profile = inner.read_profile
        self.log: list[StoreCall] = []
        self._faults: list[Fault] = []
        self._seen: list[int] = []
        self._guard = threading.Lock()
        self.add(*faults)

    @property
    def counts(self) -> Counter[str]:
        """Number of operations by name."""
        with self._guard:
            return Counter(operation.op for operation in self.log)

    def add(self, *faults: Fault) -> None:
        """Inject more faults, counting from now on."""
        with self._guard:
            self._faults.extend(faults)
            self._seen.extend(0 for _ in faults)

    def clear(self) -> None:
        """Remove all faults."""
        with self._guard:
            self._faults.clear()
            self._seen.clear()

    make_root = _counted(Store.make_root)
    list = _counted(Store.list)
    stat = _counted(Store.stat)
    version = _counted(Store.version)
    publish = _counted(Store.publish)  # fails before publishing, because publishing is atomic
    delete = _counted(Store.delete)
    delete_if = _counted(Store.delete_if, "delete")
    abort_uploads = _counted(Store.abort_uploads)
    lock = _counted(Store.lock)
    sync = _counted(Store.sync)
    make_durable = _counted(Store.make_durable)
    remove_root = _counted(Store.remove_root)

    def exists(self) -> bool:
        """See `Store`; not an operation."""
        return self.inner.exists()

    def traffic(self) -> dict[str, float]:
        """See `Store`; not an operation."""
        return self.inner.traffic()

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """See `Store`; ``flip_byte`` applies."""
        due = self._run("read", name)
        data = bytearray(self.inner.read(name, limit_bytes=limit_bytes))
        _flip([memoryview(data)], due)
        return bytes(data)

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """See `Store`; reads through the handle are operations."""
        self._run("open_read", name)
        return _FaultyReadHandle(self, self.inner.open_read(name, expected_bytes=expected_bytes))

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> WriteHandle:
        """See `Store`; writes through the handle are operations."""
        self._run("create", name)
        return _FaultyWriteHandle(
            self, self.inner.create(name, durable=durable, expected_bytes=expected_bytes, replace=replace)
        )

    def _begin(self, op: str, name: str = "", size_bytes: int = 0) -> tuple[StoreCall, Sequence[Fault]]:
        """Log the operation and return the due faults."""
        with self._guard:
            operation = StoreCall(len(self.log) + 1, op, name, size_bytes)
            self.log.append(operation)
            due = []
            for row, fault in enumerate(self._faults):
                if fnmatch.fnmatchcase(op, fault.op) and fnmatch.fnmatchcase(name, fault.name):
                    self._seen[row] += 1
                    if self._seen[row] == fault.at or (fault.onwards and self._seen[row] > fault.at):
                        due.append(fault)
        return operation, due

    def _run(self, op: str, name: str = "", size_bytes: int = 0) -> Sequence[Fault]:
        operation, due = self._begin(op, name, size_bytes)
        _strike(operation, due)
        return due


class _FaultyReadHandle(ReadHandle):
    def __init__(self, store: FaultInjectingStore, inner: ReadHandle) -> None:
        self._store = store
        self._inner = inner
        self.name = inner.name
        self.size_bytes = inner.size_bytes

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        due = self._store._run("preadv", self.name, sum(buffer.nbytes for buffer in buffers))
        self._inner.preadv(buffers, offset)
        _flip(buffers, due)

    def close(self) -> None:
        self._inner.close()


class _FaultyWriteHandle(WriteHandle):
    def __init__(self, store: FaultInjectingStore, inner: WriteHandle) -> None:
        self._store = store
        self._inner = inner
        self.name = inner.name

    @property
    def position(self) -> int:
        return self._inner.position

    def write(self, data: Buffer) -> None:
        view = byte_view(data)
        operation, due = self._store._begin("write", self.name, len(view))
        torn = max((fault.torn_bytes for fault in due if fault.error is not None), default=0)
        if torn:
            self._inner.write(view[:torn])
        _strike(operation, due)
        self._inner.write(view)

    def write_many(self, parts: Sequence[bytes | memoryview]) -> None:
        self.write(b"".join(parts))

    def finish(self) -> int:
        self._store._run("finish", self.name, self.position)
        return self._inner.finish()

    def abort(self) -> None:
        self._store._run("abort", self.name)
        self._inner.abort()


def _strike(operation: StoreCall, due: Sequence[Fault]) -> None:
    for fault in due:
        if fault.delay_seconds:
            time.sleep(fault.delay_seconds)
        if fault.hook is not None:
            fault.hook(operation)
        if fault.error is not None:
            raise fault.error


def _flip(buffers: Sequence[memoryview], due: Sequence[Fault]) -> None:
    total = sum(buffer.nbytes for buffer in buffers)
    for fault in due:
        if fault.flip_byte is None or total == 0:
            continue
        position = fault.flip_byte % total
        for buffer in buffers:
            if position < buffer.nbytes:
                byte_view(buffer)[position] ^= 0xFF
                break
            position -= buffer.nbytes
