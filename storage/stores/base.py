"""Store interface: the operations that the library needs from a folder of files.

A checkpoint is a flat folder of immutable data files plus a few small files that are published atomically.
The interface has no append to finished files, no rename and no nested folders, and object stores can
implement all of it. Every backend is a module beside this module and passes
`dcp.storage.stores.contract.StoreContract`.

Errors are typed (`dcp.storage.errors`) and carry ``path`` and, for a failed operation, ``op``.
"""

from __future__ import annotations

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    StorageError,
)

LOCK_NAME: Final = ".lock"
"""Name of the advisory lock file; reserved, and hidden from listings."""

TEMPORARY_PREFIX: Final = ".tmp-"
"""Prefix of temporary files of a publish. A crash may leave such a file; garbage collection removes it."""

RELEASE_GIL_BYTES: Final = 64 << 10
"""Minimum size of copies that release the GIL."""

_NAME_LIMIT_BYTES: Final = 255
_VERSION_LIMIT_BYTES: Final = 1 << 34


def check_name(name: str) -> str:
    """Return ``name`` if valid as a file name of a store: a single plain path component.

    Names come from untrusted metadata and must not reach outside of the folder.

    Raises:
        CheckpointFormatError: If the name is invalid.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _NAME_LIMIT_BYTES or name in (".", "..", LOCK_NAME):
        fault = "empty, reserved, not UTF-8, or longer than 255 bytes"
    elif "/" in name or "\\" in name or "\0" in name:
        fault = "contains a path separator or NUL"
    else:
        return name
    raise CheckpointFormatError(
        f"file name {name!r} is not allowed in a checkpoint: {fault}; "
        "the metadata that names it is damaged or hostile",
        name=name,
    )


def is_name(name: str) -> bool:
    """Return True if a file or folder of a store may have this name."""
    try:
        check_name(name)
    except CheckpointFormatError:
        return False
    return True


def place_text(place: object) -> str:
    """Return the path or URL of a place as text.

    Raises:
        StorageError: If ``place`` is not a path or URL.
    """
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(text, str):
        raise StorageError(
            f"a checkpoint id must be a str or a path; {text!r:.100} is of type {type(text).__name__}"
            + (": decode it by os.fsdecode()" if isinstance(text, bytes | bytearray) else ""),
            op="open",
        )
    if not text:
        raise StorageError("the checkpoint id is empty: pass '.' for the current folder", op="open")
    if "\0" in text:
        raise StorageError(
            f"{text!r:.200} contains a NUL character, which is not allowed in a path", op="open"
        )
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise StorageError(
            f"{text!r:.200} has a character that the file system's encoding cannot represent", op="open"
        ) from None
    return text


Buffer: TypeAlias = "bytes | bytearray | memoryview[Any]"
"""Bytes to be written: C-contiguous, any item format."""


def byte_view(data: Buffer) -> memoryview:
    """Return ``data`` as a one-dimensional view of bytes. Raises `TypeError` if it is not C-contiguous."""
    view = memoryview(data)
    if view.ndim == 1 and view.format == "B" and view.c_contiguous:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def copy_bytes(target: memoryview, source: bytes | memoryview) -> None:
    """Copy bytes between views of equal length. Large copies release the GIL."""
    if len(source) < RELEASE_GIL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


class Inflow(Protocol):
    """Destination of a range that arrives in pieces, used while the bytes are still in the cache."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes expected."""

    def buffers(self) -> Iterator[memoryview]:
        """Yield memory for the whole range, in order, for one attempt; called from any thread.

        The next buffer is requested when the last is full, and once more after the last. Each iteration
        starts over: bytes of an earlier attempt are discarded.
        """


class Views:
    """`Inflow` into existing memory."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self.size_bytes = sum(map(len, views))

    def buffers(self) -> Iterator[memoryview]:
        """Yield each of the views."""
        return iter(self._views)


class Closable(ABC):
    """Base class of objects with a `close` method, usable in a ``with`` statement."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ReadHandle(Closable):
    """Open file with reads at explicit offsets, from any number of threads."""

    name: str
    size_bytes: int

    @abstractmethod
    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all ``buffers`` in order from byte ``offset``, without intermediate copies.

        Raises:
            CorruptCheckpointError: If the file is too short. The contents of the buffers are undefined.
            StorageError: If the read fails. The contents of the buffers are undefined.
        """

    def receive(self, inflow: Inflow, offset: int) -> None:
        """Read like `preadv` into the buffers of ``inflow``, as a single request."""
        for buffer in inflow.buffers():
            self.preadv([buffer], offset)
            offset += len(buffer)

    def pread(self, length: int, offset: int) -> bytes:
        """Return exactly ``length`` bytes, for example of a header."""
        data = bytearray(length)
        self.preadv([memoryview(data)], offset)
        return bytes(data)

    @abstractmethod
    def close(self) -> None:
        """Release the file. Idempotent; no other thread may be reading."""


class WriteHandle:
    """New file at ``path``, written front to back by one thread at a time.

    As a context manager, finish on a normal exit and abort on an exception. A subclass implements
    `_append`, `_complete` and `_throw_away`, or overrides the methods that call them.
    """

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self._path = path
        self._position = 0
        self._state = "open"

    @property
    def position(self) -> int:
        """Number of bytes accepted: the offset of the next record."""
        return self._position

    def write(self, data: Buffer) -> None:
        """Append ``data``. The caller may change the memory after the return.

        Raises:
            StorageFullError: If the storage or quota is full.
            StorageError: If this write or an earlier background write failed. Call `abort` afterwards.
        """
        self._check_usable()
        view = byte_view(data)
        self._append(view)
        self._position += len(view)

    def write_many(self, parts: Sequence[bytes | memoryview]) -> None:
        """Append all ``parts`` in order, like `write`."""
        for part in parts:
            self.write(part)

    def finish(self) -> int:
        """Complete the file and return the size in bytes. Idempotent.

        The file is durable if `Store.create` requested durability. The name is durable after `Store.sync`.

        Raises:
            CheckpointConflictError: If another process aborted the upload (`Store.abort_uploads`).
        """
        if self._state != "finished":
            self._check_usable()
            self._complete()
            self._state = "finished"
        return self.position

    def abort(self) -> None:
        """Remove the unfinished file. Idempotent; no effect after `finish`."""
        if self._state == "open":
            self._state = "aborted"
            self._throw_away()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
        except BaseException:
            self.abort()
            raise

    def _check_usable(self) -> None:
        if self._state != "open":
            raise ValueError(f"{self._path} is {self._state} and cannot be written")

    def _append(self, view: memoryview) -> None:
        """Append bytes to the file."""
        raise NotImplementedError(f"{type(self).__name__} has neither write() nor _append()")

    def _complete(self) -> None:
        """Complete the file."""
        raise NotImplementedError(f"{type(self).__name__} has neither finish() nor _complete()")

    def _throw_away(self) -> None:
        """Discard the unfinished file."""
        raise NotImplementedError(f"{type(self).__name__} has neither abort() nor _throw_away()")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Regular file of a store; ``modified_seconds`` counts from the epoch."""

    name: str
    size_bytes: int
    modified_seconds: float


class Version:
    """Content of a small file at a moment: opaque, compared for equality only.

    Equal versions mean equal content: a compare-and-replace loses no update. The token is a stamp of the
    service or, without a reliable stamp, a digest of the content, computed on first comparison.
    """

    __slots__ = ("_token",)

    def __init__(self, stamp: str | bytes) -> None:
        self._token = stamp

    @property
    def token(self) -> str:
        """Token used in comparisons."""
        if isinstance(self._token, bytes):
            self._token = f"sha256:{hashlib.sha256(self._token).hexdigest()}"
        return self._token

    def __eq__(self, other: object) -> bool:
        return self.token == other.token if isinstance(other, Version) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.token)

    def __reduce__(self) -> tuple[object, ...]:
        return Version, (self.token,)

    def __repr__(self) -> str:
        return f"Version({self.token!r})"


@dataclass(frozen=True, slots=True)
class ReadProfile:
    """Preferred number and size of reads of a store.

    - ``threads``: parallel reads; None depends on the number of cores.
    - ``request_bytes``: bytes per request; larger pieces are split.
    - ``join_below_bytes``: pieces up to this size are read together with neighbors; with ``scatter``, the
      largest request that is buffered as a whole.
    - ``gap_bytes``: unneeded bytes that may be read to join two pieces.
    - ``scatter``: read joined pieces into their destinations with one `ReadHandle.preadv`, for stores with
      expensive requests.
    """

    threads: int | None = None
    request_bytes: int = 8 << 20
    join_below_bytes: int = 64 << 10
    gap_bytes: int = 16 << 10
    scatter: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a store for callers that choose between algorithms.

    - ``is_local``: `Store.url` is the path of a local folder.
    - ``is_shared``: other processes see the same files.
    - ``is_writable``: files can be created and removed.
    - ``lists_folders``: `Store.folders` lists child folders and, for remote stores, `Store.tree` lists
      all files below.
    - ``lists_tree``: `Store.tree` is a single listing, cheaper than a listing per folder.
    """

    is_local: bool = False
    is_shared: bool = True
    is_writable: bool = True
    lists_folders: bool = False
    lists_tree: bool = False


class Anything(Enum):
    """Type of `ANY`."""

    ANY = "any"


ANY: Final = Anything.ANY
"""Value of ``expected=`` that publishes regardless of the present content."""


_EXTREME: Final = "slowest_"

Expected: TypeAlias = Version | Literal[Anything.ANY] | None


def traffic_since(now: dict[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return the difference of two results of `Store.traffic`; maxima keep the value of ``now``."""
    if now == before:
        return {}
    return {
        name: value if name.startswith(_EXTREME) else value - before.get(name, 0)
        for name, value in now.items()
    }


_LOCKS: Final[WeakValueDictionary[tuple[int, str], threading.RLock]] = WeakValueDictionary()
_locks_guard = threading.RLock()  # garbage collection may run code that takes a lock


def _start_afresh() -> None:
    global _locks_guard
    _locks_guard = threading.RLock()  # a thread missing in the child may hold the old lock


os.register_at_fork(after_in_child=_start_afresh)


@contextmanager
def locked(url: str, timeout_seconds: float) -> Iterator[None]:
    """Hold the in-process lock of a place.

    Raises:
        StorageError: If another thread holds the lock for ``timeout_seconds``.
    """
    with _locks_guard:
        lock = _LOCKS.setdefault((os.getpid(), url), threading.RLock())
    if not lock.acquire(timeout=max(0.0, timeout_seconds)):
        raise StorageError(
            f"{url} is still locked by another thread after {timeout_seconds:g} seconds: wait for its save "
            "to end",
            path=url,
            op="lock",
            timeout_seconds=timeout_seconds,
        )
    try:
        yield
    finally:
        lock.release()


class Store(ABC):
    """Flat folder of files, safe for several threads and processes.

    Subclasses implement the operations for a kind of storage. Open a store with
    `dcp.storage.stores.open_store`.
    """

    url: str
    """URL or path of the folder, used in messages."""

    read_profile: ReadProfile = ReadProfile()
    """Preferred scheduling of reads."""

    capabilities: Capabilities = Capabilities()
    """Properties of this store."""

    def path_of(self, name: str) -> str:
        """Return ``name`` below `url`, for messages and the ``path`` of errors."""
        return f"{self.url}/{name}"

    def make_root(self) -> None:  # noqa: B027 - a prefix of keys needs no making
        """Create the folder and parents durably, before the first data file. No effect on an existing
        folder.
        """

    @abstractmethod
    def list(self) -> list[FileInfo]:
        """Return the regular files directly below the root, sorted by name; ``[]`` for a missing root.

        Temporary files are included, the lock file is not.
        """

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time of a file without opening the file; None if no regular file has this name."""
        check_name(name)
        return next((info for info in self.list() if info.name == name), None)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return a whole small file, such as a manifest, in one request.

        Args:
            name: File name.
            limit_bytes: Maximum size, checked on the open file before memory is allocated.

        Raises:
            CheckpointNotFoundError: If the file is absent.
            CheckpointFormatError: If the file is larger than ``limit_bytes``.
        """
        with self.open_read(name) as handle:
            if handle.size_bytes > limit_bytes:
                raise self.too_large(name, handle.size_bytes, limit_bytes)
            return handle.pread(handle.size_bytes, 0)

    def read_start(self, name: str, size_bytes: int) -> tuple[bytes, int]:
        """Return the first ``size_bytes`` of a file (fewer for a short file) and the total size, in one
        request.

        Raises:
            CheckpointNotFoundError: If the file is absent.
        """
        with self.open_read(name) as handle:
            return handle.pread(min(size_bytes, handle.size_bytes), 0), handle.size_bytes

    @abstractmethod
    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Open a data file for ranged reads.

        Args:
            name: File name.
            expected_bytes: Known size. The store may skip the size request and report a missing or
                different file at the first read.

        Raises:
            CheckpointNotFoundError: If the file is absent.
            CorruptCheckpointError: If the size differs from ``expected_bytes``.
        """

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> WriteHandle:
        """Create a data file.

        Args:
            name: File name.
            durable: Survive a power loss after `WriteHandle.finish`.
            expected_bytes: Approximate final size. The store may reserve space and raise `StorageFullError`
                early.
            replace: Replace an existing file: on S3 when the new file completes, elsewhere at once.

        Raises:
            StorageError: If the name exists and ``replace`` is False; stores with invisible unfinished
                files raise in `WriteHandle.finish`.
        """
        raise self._refused("create", self.path_of(name))

    def version(self, name: str) -> Version | None:
        """Return the present version of a small file for a later compare-and-replace; None if absent."""
        try:
            return Version(self.read(name, limit_bytes=_VERSION_LIMIT_BYTES))
        except CheckpointNotFoundError:
            return None

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Expected = ANY) -> Version:
        """Set the content of ``name`` atomically: the commit. A crash leaves the old or the new content.

        Args:
            name: File name.
            data: New content.
            durable: Survive a power loss after the return.
            expected: None publishes only a new name, a `Version` replaces only this content, `ANY` always
                publishes.

        Returns:
            The version of the new content.

        Raises:
            CheckpointConflictError: If the present content differs from ``expected``.
            StorageError: If the outcome is unknown, unless ``published`` is set; the caller must check.
        """
        raise self._refused("publish", self.path_of(name))

    def delete(self, name: str) -> None:
        """Remove a file. No effect if the file is missing."""
        raise self._refused("delete", self.path_of(name))

    def delete_if(self, name: str, expected: Version) -> bool:
        """Remove a file with the content ``expected``; return False if the content differs.

        A missing file counts as removed. Comparison and removal are one atomic step where supported, or
        under a lock that excludes other processes.
        """
        there = self.version(name)
        if there is None:
            return True
        if there != expected:
            return False
        self.delete(name)
        return True

    def delete_all(self, names: Sequence[str]) -> dict[str, Exception]:
        """Remove several files in any order; return failures by name. Every name is tried."""
        failed: dict[str, Exception] = {}
        for name in names:
            try:
                self.delete(name)
            except Exception as error:  # noqa: BLE001 - returned; the other files must go as well
                failed[name] = error
        return failed

    def conflict(self, name: str) -> CheckpointConflictError:
        """Return the error of `publish` for unexpected content."""
        return CheckpointConflictError(
            f"{self.path_of(name)} was published by another writer since this save began and was not "
            "replaced: save under another id, or load that checkpoint first",
            path=self.path_of(name),
        )

    def taken(self, name: str) -> StorageError:
        """Return the error of `create` for an existing name."""
        path = self.path_of(name)
        return StorageError(
            f"{path} exists already, and data files are never overwritten: save again", path=path, op="create"
        )

    def absent(self, name: str) -> CheckpointNotFoundError:
        """Return the error of a read of a missing file."""
        return CheckpointNotFoundError(f"{self.path_of(name)} does not exist", path=self.path_of(name))

    def too_large(self, name: str, size_bytes: int, limit_bytes: int) -> CheckpointFormatError:
        """Return the error of `read` for a file above the limit."""
        return CheckpointFormatError(
            f"{self.path_of(name)} has {size_bytes} bytes, more than the limit of {limit_bytes} for this "
            "kind of file: it is damaged or hostile",
            path=self.path_of(name),
            size_bytes=size_bytes,
            limit_bytes=limit_bytes,
        )

    def abort_uploads(self, belongs: Callable[[str], bool]) -> int:
        """Abort unfinished uploads of files with ``belongs(name)`` and return their number.

        Object stores keep and charge for unfinished uploads of killed writers, invisible in listings. An
        active writer of such an upload fails. Other stores return 0.
        """
        return 0

    def traffic(self) -> dict[str, float]:
        """Return counters of requests made by this object; ``{}`` without counters.

        Keys: "requests" in total and by kind ("get", "put", ...), "retries", "bytes_received",
        "bytes_sent", "request_seconds" (summed) and "slowest_request_seconds".
        """
        return {}

    def lock(self, *, timeout_seconds: float) -> AbstractContextManager[None]:
        """Hold an exclusive advisory lock between threads and, if supported, processes.

        The lock is re-entrant in a thread through one store object and released when the holder dies.
        Object stores lock only between threads; conditional requests in `publish` exclude other processes.

        Raises:
            StorageError: After ``timeout_seconds``.
        """
        return locked(self.url, timeout_seconds)

    def sync(self) -> None:  # noqa: B027 - a service has done so when it answers
        """Make names durable. Finished files survive a power loss only after this call."""

    def make_durable(self) -> None:
        """Like `sync`, including files finished without ``durable``."""
        self.sync()

    def remove_root(self) -> None:  # noqa: B027 - a prefix of keys is gone with its last one
        """Remove the folder if empty. No effect on a missing or non-empty folder."""

    # -- folders below, for stores with `Capabilities.lists_folders` ----------------------------------------

    def exists(self) -> bool:
        """Return True if the folder exists; always True for stores without folders."""
        return True

    def folders(self) -> Sequence[str]:
        """Return the sorted names of folders directly below this folder, by one listing."""
        return sorted({folder.partition("/")[0] for folder, _ in self.tree() if folder})

    def walk(self) -> Iterator[tuple[str, FileInfo]]:
        """Yield (folder, file) for all files of the folders directly below this folder."""
        return ((folder, info) for folder, info in self.tree() if folder and "/" not in folder)

    def tree(self) -> Iterator[tuple[str, FileInfo]]:
        """Yield (relative folder, file) for all files below at any depth; "" is the folder itself. Files
        below a folder come together.
        """
        raise StorageError(
            f"{self.url}: a {type(self).__name__} cannot list the folders below it",
            path=self.url,
            op="list",
        )

    def _refused(self, op: str, path: str) -> StorageError:
        return StorageError(f"{path}: a {type(self).__name__} is read-only", path=path, op=op)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class ReadOnlyStore(Store):
    """Read-only store. A subclass implements `list` and `open_read`, and `tree` to list folders."""

    capabilities = Capabilities(is_writable=False)

    def make_root(self) -> None:
        """Raise an error, like all write operations."""
        raise self._refused("mkdir", self.url)

    def remove_root(self) -> None:
        """Raise an error."""
        raise self._refused("rmdir", self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreType:
    """URL schemes of a kind of store and the function that opens a store; see
    `dcp.storage.stores.register_store`.

    ``open`` receives the URL (or a path for ``file``) and the storage options. Without ``takes_options``,
    any option is an error.
    """

    schemes: tuple[str, ...]
    open: Callable[[str, Mapping[str, Any] | None], Store]
    takes_options: bool = False
