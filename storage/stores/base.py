"""The store interface: everything the package asks of a place that keeps files.

A checkpoint is a flat folder of immutable data files plus a few small files that are published atomically.
The interface has exactly the operations this needs, so that an object store can offer them too: no append to
a finished file, no rename, no nested folders. One backend is one file beside this one, and every backend
passes `dcp.storage.stores.contract.StoreContract`.

Errors are typed (`dcp.storage.errors`) and carry ``path`` and, where an operation failed, ``op``.
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
"""The advisory lock's file where a backend needs one; reserved, and left out of listings."""

TEMPORARY_PREFIX: Final = ".tmp-"
"""Files written aside for a publish are named so. A crash may leave one; garbage collection removes it."""

RELEASE_GIL_BYTES: Final = 64 << 10
"""Copies from this size on let other threads run."""

_NAME_LIMIT_BYTES: Final = 255
_VERSION_LIMIT_BYTES: Final = 1 << 34


def check_name(name: str) -> str:
    """Return ``name`` itself if it is one plain path component that a file of a store may have.

    Raises `CheckpointFormatError` otherwise: names come out of metadata that others wrote, and must not
    reach outside of the folder.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _NAME_LIMIT_BYTES or name in (".", "..", LOCK_NAME):
        fault = "empty, reserved, not UTF-8, or longer than 255 bytes"
    elif "/" in name or "\\" in name or "\0" in name:
        fault = "has a path separator or NUL in it"
    else:
        return name
    raise CheckpointFormatError(
        f"file name {name!r} is not allowed in a checkpoint: {fault}; "
        "the metadata that names it is damaged or hostile",
        name=name,
    )


def is_name(name: str) -> bool:
    """Return whether a file or folder of a store may have this name."""
    try:
        check_name(name)
    except CheckpointFormatError:
        return False
    return True


def place_text(place: object) -> str:
    """Return the path or URL that names a place, as text; `StorageError` for what names none."""
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(text, str):
        raise StorageError(
            f"a checkpoint is named by a str or a path, and {text!r:.100} is of type {type(text).__name__}"
            + (": decode it, as by os.fsdecode()" if isinstance(text, bytes | bytearray) else ""),
            op="open",
        )
    if not text:
        raise StorageError("an empty path names no folder: pass '.' for the current one", op="open")
    if "\0" in text:
        raise StorageError(f"{text!r:.200} has a NUL character in it, which no path may have", op="open")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise StorageError(
            f"{text!r:.200} has a character that the file system's encoding lacks", op="open"
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
    """Copy into a view of bytes of the same length; large copies let other threads run (release the GIL)."""
    if len(source) < RELEASE_GIL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


class Inflow(Protocol):
    """Takes in a range of a file as it comes, so that what has come is used while a cache has it."""

    @property
    def size_bytes(self) -> int:
        """Return how much it takes."""

    def buffers(self) -> Iterator[memoryview]:
        """Yield memory for all of it, in order, for one attempt to fetch it; from any thread.

        The next buffer is asked for when the last one is full, and after the last one once more. Asked anew,
        it begins anew: what came by an attempt before does not count.
        """


class Views:
    """The `Inflow` into memory that is all there."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self.size_bytes = sum(map(len, views))

    def buffers(self) -> Iterator[memoryview]:
        """Yield each of the views."""
        return iter(self._views)


class Closable(ABC):
    """Holds something until `close`, which a ``with`` block calls at its end."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ReadHandle(Closable):
    """An open file, read at explicit offsets, by any number of threads at once."""

    name: str
    size_bytes: int

    @abstractmethod
    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all ``buffers`` exactly, in order, from byte ``offset`` on, without a copy in between.

        Raises `CorruptCheckpointError` if the file ends before, `StorageError` if reading fails. Contents of
        the buffers are then undefined.
        """

    def receive(self, inflow: Inflow, offset: int) -> None:
        """Read as `preadv`, into the buffers of ``inflow``, where its size is worth one request."""
        for buffer in inflow.buffers():
            self.preadv([buffer], offset)
            offset += len(buffer)

    def pread(self, length: int, offset: int) -> bytes:
        """Return exactly ``length`` bytes: for headers, where a destination of one's own is not worth it."""
        data = bytearray(length)
        self.preadv([memoryview(data)], offset)
        return bytes(data)

    @abstractmethod
    def close(self) -> None:
        """Release the file; idempotent. No read may be running in another thread."""


class WriteHandle:
    """A new file at ``path``, written front to back by one thread at a time: open, finished or aborted.

    As a context manager it finishes on a normal exit and aborts on an exception. A subclass has `_append`,
    `_complete` and `_throw_away`, or methods of its own instead of those that call them.
    """

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self._path = path
        self._position = 0
        self._state = "open"

    @property
    def position(self) -> int:
        """Return the bytes accepted so far, so that the caller learns at which offset a record begins."""
        return self._position

    def write(self, data: Buffer) -> None:
        """Append ``data``, consumed before return: the caller may change the memory at once.

        Raises `StorageFullError` or `StorageError`, also for an earlier write that failed in the background;
        then only `abort` is of use.
        """
        self._check_usable()
        view = byte_view(data)
        self._append(view)
        self._position += len(view)

    def write_many(self, parts: Sequence[bytes | memoryview]) -> None:
        """Append all of ``parts``, as `write` does each."""
        for part in parts:
            self.write(part)

    def finish(self) -> int:
        """Bring everything to storage, durable where `Store.create` was asked so; returns the size in bytes.

        Raises `CheckpointConflictError` if another process has ended its upload (`Store.abort_uploads`).
        The name itself is durable only after `Store.sync`, once for all files of a folder. Idempotent.
        """
        if self._state != "finished":
            self._check_usable()
            self._complete()
            self._state = "finished"
        return self.position

    def abort(self) -> None:
        """Remove the file, for a save that failed. Idempotent; after `finish` it does nothing."""
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
            raise ValueError(f"{self._path} is {self._state}: nothing can be written to it any more")

    def _append(self, view: memoryview) -> None:
        """Take in some bytes."""
        raise NotImplementedError(f"{type(self).__name__} has neither write() nor _append()")

    def _complete(self) -> None:
        """Make the file."""
        raise NotImplementedError(f"{type(self).__name__} has neither finish() nor _complete()")

    def _throw_away(self) -> None:
        """Throw away what was written."""
        raise NotImplementedError(f"{type(self).__name__} has neither abort() nor _throw_away()")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One regular file of a store; ``modified_seconds`` counts from the epoch."""

    name: str
    size_bytes: int
    modified_seconds: float


class Version:
    """The content that a small file has now: opaque, to be compared for equality only.

    Equal versions mean equal content, so that a replacement that compares versions loses no update. It is
    made of the stamp that a service gives, or, where there is none as trustworthy, of the content itself,
    whose digest costs something and is made when it is compared.
    """

    __slots__ = ("_token",)

    def __init__(self, stamp: str | bytes) -> None:
        self._token = stamp

    @property
    def token(self) -> str:
        """Return the text that is compared."""
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
    """Preferences of a store for reads: what a request costs decides how many there should be, and how large.

    - ``threads``: reads at a time; None goes by the machine's cores.
    - ``request_bytes``: how much one request should fetch; larger pieces are split.
    - ``join_below_bytes``: pieces up to this size are read together with their neighbours; with ``scatter``
      how large a request may be that has to be in memory as a whole before it is handed out.
    - ``gap_bytes``: bytes that may be read for nothing to join two pieces.
    - ``scatter``: joined pieces go straight to their destinations by one `ReadHandle.preadv`, because a
      request costs far more than a buffer.
    """

    threads: int | None = None
    request_bytes: int = 8 << 20
    join_below_bytes: int = 64 << 10
    gap_bytes: int = 16 << 10
    scatter: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a store by which callers choose a way; its class is not asked for.

    - ``is_local``: `Store.url` is the path of a folder of this machine.
    - ``is_shared``: other processes see the same files.
    - ``is_writable``: files can be made and removed.
    - ``lists_folders``: `Store.folders` tells the folders below it, and `Store.tree`, unless it is local,
      all that is in them.
    - ``lists_tree``: that is one listing, and costs less than looking into each folder.
    """

    is_local: bool = False
    is_shared: bool = True
    is_writable: bool = True
    lists_folders: bool = False
    lists_tree: bool = False


class Anything(Enum):
    """The type of `ANY`."""

    ANY = "any"


ANY: Final = Anything.ANY
"""``expected=ANY``: publish whatever is there now."""


_EXTREME: Final = "slowest_"

Expected: TypeAlias = Version | Literal[Anything.ANY] | None


def traffic_since(now: dict[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return the `Store.traffic` of ``now`` less what it was ``before``; of extremes the present value."""
    if now == before:
        return {}
    return {
        name: value if name.startswith(_EXTREME) else value - before.get(name, 0)
        for name, value in now.items()
    }


_LOCKS: Final[WeakValueDictionary[tuple[int, str], threading.RLock]] = WeakValueDictionary()
_locks_guard = threading.RLock()  # the collector may run what takes a lock, wherever it is held


def _start_afresh() -> None:
    global _locks_guard
    _locks_guard = threading.RLock()  # a thread that the child does not have may hold the old one


os.register_at_fork(after_in_child=_start_afresh)


@contextmanager
def locked(url: str, timeout_seconds: float) -> Iterator[None]:
    """Hold the lock of a place between the threads of this process, which exists as long as a thread has it.
    Raises `StorageError` if another thread holds it for ``timeout_seconds``."""
    with _locks_guard:
        lock = _LOCKS.setdefault((os.getpid(), url), threading.RLock())
    if not lock.acquire(timeout=max(0.0, timeout_seconds)):
        raise StorageError(
            f"{url} is locked by another thread, and was still after {timeout_seconds:g} seconds",
            path=url,
            op="lock",
            timeout_seconds=timeout_seconds,
        )
    try:
        yield
    finally:
        lock.release()


class Store(ABC):
    """A flat folder of files, safe to use from several threads and processes."""

    url: str
    """Names the folder in messages."""

    read_profile: ReadProfile = ReadProfile()
    """How reads of it are best scheduled."""

    capabilities: Capabilities = Capabilities()
    """What it is and can do."""

    def path_of(self, name: str) -> str:
        """Return ``name`` below `url`, for messages and the ``path`` of errors."""
        return f"{self.url}/{name}"

    def make_root(self) -> None:  # noqa: B027 - a prefix of keys needs no making
        """Create the folder and its parents, durably; fine if it is there. Before the first data file."""

    @abstractmethod
    def list(self) -> list[FileInfo]:
        """Return the regular files directly below the root, sorted by name, temporary ones too (garbage
        collection needs them), the lock file not; ``[]`` if the root does not exist.
        """

    def stat(self, name: str) -> FileInfo | None:
        """Return one file's size without opening it; None if there is no regular file of that name."""
        check_name(name)
        return next((info for info in self.list() if info.name == name), None)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return a whole small file (a manifest) in one request.

        Raises `CheckpointNotFoundError` if it is absent, and `CheckpointFormatError` above ``limit_bytes``,
        before memory for it is taken. The size is checked on the open file, so that a swap in between gains
        nothing.
        """
        with self.open_read(name) as handle:
            if handle.size_bytes > limit_bytes:
                raise self.too_large(name, handle.size_bytes, limit_bytes)
            return handle.pread(handle.size_bytes, 0)

    def read_start(self, name: str, size_bytes: int) -> tuple[bytes, int]:
        """Return (the first ``size_bytes`` of a file, or all if it has fewer; how many it has). One request.

        Raises `CheckpointNotFoundError` if it is absent.
        """
        with self.open_read(name) as handle:
            return handle.pread(min(size_bytes, handle.size_bytes), 0), handle.size_bytes

    @abstractmethod
    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Open a data file for ranged reads. Raises `CheckpointNotFoundError` if it is absent.

        Given the size that the file must have, a store may take it for granted now and save a request. It
        then raises `CheckpointNotFoundError` or `CorruptCheckpointError` (another size) at the first read.
        """

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> WriteHandle:
        """Begin a data file. Raises `StorageError` if the name exists: data files are never overwritten.
        A store that cannot see unfinished files raises it at the latest in `WriteHandle.finish`.

        ``expected_bytes`` is the size that the file will have; a store may reserve it, and raise
        `StorageFullError` now instead of after hours. It need not be exact.

        With ``replace`` a file of that name gives way: on S3 at the instant at which the new one appears,
        else now.
        """
        raise self._refused("create", self.path_of(name))

    def version(self, name: str) -> Version | None:
        """Return which content a small file has now, to replace exactly that one later; None if it is
        absent. A digest, unless the store has anything better."""
        try:
            return Version(self.read(name, limit_bytes=_VERSION_LIMIT_BYTES))
        except CheckpointNotFoundError:
            return None

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Expected = ANY) -> Version:
        """Make ``name`` hold ``data``, atomically: the commit. After a crash it is the old or the new.

        ``expected=None`` publishes only if the name does not exist, a `Version` only over that content, `ANY`
        always. Raises `CheckpointConflictError` if something else is there. Any other error leaves open what
        happened, unless it says that it is ``published``: the caller has to look.
        """
        raise self._refused("publish", self.path_of(name))

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is fine, since deletion is repeated after crashes."""
        raise self._refused("delete", self.path_of(name))

    def delete_if(self, name: str, expected: Version) -> bool:
        """Remove a file that still has the content ``expected``; False if it has another, and stays.

        A missing one is fine. Compared and removed in one step where the store can; else one after the other,
        which is one step too for the holder of a lock that excludes other processes.
        """
        there = self.version(name)
        if there is None:
            return True
        if there != expected:
            return False
        self.delete(name)
        return True

    def delete_all(self, names: Sequence[str]) -> dict[str, Exception]:
        """Remove several files, in few requests where the store can; returns what failed, by name.

        Every name is tried. The order among them is not defined.
        """
        failed: dict[str, Exception] = {}
        for name in names:
            try:
                self.delete(name)
            except Exception as error:  # noqa: BLE001 - returned; the other files must go as well
                failed[name] = error
        return failed

    def conflict(self, name: str) -> CheckpointConflictError:
        """Return what `publish` raises where something else than was expected is there."""
        return CheckpointConflictError(
            f"{self.path_of(name)} was published by another writer since this save began, and is untouched; "
            "save under another id, or load what is there first",
            path=self.path_of(name),
        )

    def taken(self, name: str) -> StorageError:
        """Return what `create` raises where there is a file of the name."""
        path = self.path_of(name)
        return StorageError(
            f"{path} exists already: data files are never overwritten", path=path, op="create"
        )

    def absent(self, name: str) -> CheckpointNotFoundError:
        """Return what reading raises where there is no file of the name."""
        return CheckpointNotFoundError(f"{self.path_of(name)} does not exist", path=self.path_of(name))

    def too_large(self, name: str, size_bytes: int, limit_bytes: int) -> CheckpointFormatError:
        """Return what `read` raises for a file that is larger than one of its kind may be."""
        return CheckpointFormatError(
            f"{self.path_of(name)} has {size_bytes} bytes, more than the {limit_bytes} that such a file may "
            "have: it is damaged or hostile",
            path=self.path_of(name),
            size_bytes=size_bytes,
            limit_bytes=limit_bytes,
        )

    def abort_uploads(self, belongs: Callable[[str], bool]) -> int:
        """End unfinished uploads of the files for which ``belongs(name)``; returns how many there were.

        A killed writer leaves them on an object store, where no listing shows them and they cost money. A
        writer that is still at work on one of them fails. Stores without such a thing have none.
        """
        return 0

    def traffic(self) -> dict[str, float]:
        """Return what this object has asked of its service so far; ``{}`` where nothing is counted.

        Where it is: "requests" in all and by kind ("get", "put", ...), "retries", "bytes_received",
        "bytes_sent", "request_seconds" (summed) and "slowest_request_seconds".
        """
        return {}

    def lock(self, *, timeout_seconds: float) -> AbstractContextManager[None]:
        """Hold a lock, advisory and exclusive between threads, and between processes where the store has such
        a thing; released when the holder dies.

        An object store has not: there only the comparison in `publish` arbitrates. Re-entrant in one thread
        through one store object. Raises `StorageError` after ``timeout_seconds``.
        """
        return locked(self.url, timeout_seconds)

    def sync(self) -> None:  # noqa: B027 - a service has done so when it answers
        """Make names durable: finished files survive a power loss only after this."""

    def make_durable(self) -> None:
        """Do as `sync`, also for files that were finished without ``durable``: all that are here."""
        self.sync()

    def remove_root(self) -> None:  # noqa: B027 - a prefix of keys is gone with its last one
        """Remove the folder if it is empty, and leave it alone if it is not; a missing one is fine."""

    # -- folders below, where `Capabilities.lists_folders` says that it knows of any ------------------------

    def exists(self) -> bool:
        """Return whether the folder itself is there. Kinds without folders, which have nothing to make, say
        yes."""
        return True

    def folders(self) -> Sequence[str]:
        """Return the names of the folders directly below this one, sorted; one listing. ``[]`` if there are
        none."""
        return sorted({folder.partition("/")[0] for folder, _ in self.tree() if folder})

    def walk(self) -> Iterator[tuple[str, FileInfo]]:
        """Yield the files of all folders directly below this one: (folder, file)."""
        return ((folder, info) for folder, info in self.tree() if folder and "/" not in folder)

    def tree(self) -> Iterator[tuple[str, FileInfo]]:
        """Yield all files below, however deep: (folder relative to this one, "" is itself; file), in an order
        in which all that is below a folder comes together."""
        raise StorageError(
            f"{self.url}: the checkpoints below a {type(self).__name__} cannot be listed",
            path=self.url,
            op="list",
        )

    def _refused(self, op: str, path: str) -> StorageError:
        return StorageError(f"{path}: a {type(self).__name__} can only be read", path=path, op=op)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class ReadOnlyStore(Store):
    """A store of files that are only read: `list` and `open_read` are all that a subclass has to have.

    It lists the folders below it where it has a `tree` as well, and says so in its `capabilities`.
    """

    capabilities = Capabilities(is_writable=False)

    def make_root(self) -> None:
        """Refuse it, as all that writes."""
        raise self._refused("mkdir", self.url)

    def remove_root(self) -> None:
        """Refuse it."""
        raise self._refused("rmdir", self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreType:
    """The URLs of a kind of store, and the function that makes one: see `dcp.storage.stores.register_store`.

    ``open`` gets the URL as it was given (of ``file`` a path, too) and its storage options. A type that is
    not ``takes_options`` never gets any: giving some is an error.
    """

    schemes: tuple[str, ...]
    open: Callable[[str, Mapping[str, Any] | None], Store]
    takes_options: bool = False
