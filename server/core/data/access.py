"""Access to the contents of catalog checkpoints for callers with the right to see them.

Each checkpoint is opened once and kept while in use and unchanged. Expensive values are computed once for
all requests, and the most recent ones are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from sqlalchemy import Connection

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.inputs import short_name
from dcp.server.core.allowances import Allowance, LimitSubject, subjects_of
from dcp.server.core.data.responses import Body, BodyResponse, choose_range, disposition
from dcp.server.core.data.sharing import Share, Streams
from dcp.server.core.http.context import Service
from dcp.server.core.problems import ConflictError, GoneError, NotFoundError, UnavailableError
from dcp.server.core.roots import StorageRoot
from dcp.server.core.security.principal import Principal
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store

if TYPE_CHECKING:
    from dcp.storage.formats.index import CheckpointIndex
    from dcp.storage.formats.opening import SourcePlace

Wanted = Callable[[], None]
"""Callback between the steps of a computation; raises `AbandonedError` once no request waits."""


class AbandonedError(Exception):
    """No request waits for the value."""


class _Sized(Protocol):
    @property
    def held_bytes(self) -> int:
        """The approximate memory of the value."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=_Sized)


@dataclass(slots=True)
class _Making(Generic[V]):
    future: Future[V] = field(default_factory=Future)
    waiting: int = 0


class SharedValues(Generic[K, V]):
    """Values by a key that identifies the content, so replaced content is never returned. Thread-safe.

    Keeps up to ``count`` values and ``kept_bytes`` in total. Larger values are shared while in use.
    """

    def __init__(self, *, count: int, kept_bytes: int) -> None:
        self._count = count
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._in_use: WeakValueDictionary[K, V] = WeakValueDictionary()
        self._making: dict[K, _Making[V]] = {}
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """The number of requests waiting for a value, including computing ones."""
        return self._waiting

    def __contains__(self, key: K) -> bool:
        """Return True if a value is kept or being computed."""
        with self._lock:
            return self._known(key) is not None or key in self._making

    def find(self, key: K) -> V | None:
        """Return the value if kept."""
        with self._lock:
            return self._known(key)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value, or compute it with ``make`` in this thread."""
        making, is_new = self._join(key)
        try:
            if is_new:
                self._make(key, making, lambda _: make())
            return making.future.result()
        finally:
            self._leave(key, making)

    async def get_from(self, executor: Executor, key: K, make: Callable[[Wanted], V]) -> V:
        """Return the value like `get`, computed by ``executor``. Cancelled with the last waiting request."""
        making, is_new = self._join(key)
        try:
            if is_new:
                executor.submit(self._make, key, making, make)
            # shielded from cancellation: other requests wait for the same future
            return await asyncio.shield(asyncio.wrap_future(making.future))
        finally:
            self._leave(key, making)

    def _known(self, key: K) -> V | None:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        return self._in_use.get(key)

    def _join(self, key: K) -> tuple[_Making[V], bool]:
        with self._lock:
            self._waiting += 1
            known = self._known(key)
            making = self._making.get(key)
            is_new = known is None and making is None
            if making is None:
                making = _Making()
            if known is not None:
                making.future.set_result(known)
            else:
                self._making[key] = making
            making.waiting += 1
            return making, is_new

    def _leave(self, key: K, making: _Making[V]) -> None:
        with self._lock:
            self._waiting -= 1
            making.waiting -= 1
            if not making.waiting and self._making.get(key) is making:
                del self._making[key]  # a later request computes the value again

    def _make(self, key: K, making: _Making[V], make: Callable[[Wanted], V]) -> None:
        def check() -> None:
            if not making.waiting:
                raise AbandonedError

        try:
            check()
            made = make(check)
        except BaseException as error:  # noqa: BLE001 - passed on to all that wait
            making.future.set_exception(error)
            made = None
        with self._lock:
            if self._making.get(key) is making:
                del self._making[key]
            if made is not None:
                self._keep(key, made)
        if made is not None:
            making.future.set_result(made)

    def _keep(self, key: K, made: V) -> None:
        self._in_use[key] = made
        if made.held_bytes > self._kept_bytes:
            return
        self._kept[key] = made
        held_bytes = sum(one.held_bytes for one in self._kept.values())
        while len(self._kept) > self._count or held_bytes > self._kept_bytes:
            held_bytes -= self._kept.popitem(last=False)[1].held_bytes


# -- checkpoints of the catalog ------------------------------------------------------------------------------


_GONE: Final = {
    "deleted": "deleted; restore the checkpoint first",
    "purged": "deleted, and its files are purged",
}
_NOT_YET: Final = {
    "incomplete": "the save was not committed",
    "unreadable": "the checkpoint is unreadable",
}
_KEPT_BYTES: Final = 64 << 20
_KEPT: Final = 16
_LARGE_BYTES: Final = 4 << 20
_MAX_WAITING: Final = 24
"""Maximum threads waiting for large checkpoints; the others stay available."""

_NAME_BYTES: Final = 400
"""Memory per name: the text, its dict entry, and its path as tuple."""
_MOVING: Final = frozenset({"notes.msgpack"})
"""Files of a checkpoint that change independently of its data."""


@dataclass(frozen=True)
class Stamped:
    """A state of a checkpoint. ``stamp`` changes with the name, size or time of any file."""

    root: str
    key: str
    stamp: str

    def etag(self, *facts: object) -> str:
        """Return the strong entity tag of a result that depends on this checkpoint and ``facts``."""
        text = "\0".join((self.root, self.key, self.stamp, *map(repr, facts)))
        return f'"{hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]}"'


@dataclass(frozen=True)
class FoundCheckpoint(Stamped):
    """A checkpoint with listed files and unread index. ``is_large``: the index is large."""

    place: SourcePlace
    is_large: bool

    @property
    def state(self) -> Stamped:
        """The checkpoint by name and stamp alone."""
        return Stamped(self.root, self.key, self.stamp)


@dataclass(frozen=True, eq=False)
class OpenCheckpoint(Stamped):
    """A checkpoint with its index."""

    store: Store
    index: CheckpointIndex
    file: str | None

    @cached_property
    def held_bytes(self) -> int:
        """The approximate memory of the index."""
        return _size_bytes(self.index)

    @cached_property
    def whole_index(self) -> CheckpointIndex:
        """The complete index, including data stored outside of it such as non-tensor values; read once.

        Raises errors of formats and storage.
        """
        from dcp.storage.formats.opening import (
            complete_index,
        )  # imported late, like all modules that read tensors

        return complete_index(self.store, self.index)

    def row(self, fqn: str) -> int:
        """Return the index row of the tensor ``fqn``, also for a name shortened by the catalog. Raises
        NotFoundError."""
        row = self.index.position.get(fqn)
        if row is None and ("..." in fqn or "\\" in fqn):
            row = next((at for at, name in enumerate(self.index.fqns) if short_name(name) == fqn), None)
        if row is None:
            is_value = fqn in self.index.objects.position
            what = "a value, not a tensor" if is_value else "not in the checkpoint"
            raise NotFoundError(f"{fqn[:200]!r} is {what}")
        return row


class _OpenCheckpoints:
    """The recently used open checkpoints. Thread-safe; large ones are shared, not kept.

    Each checkpoint is read once for all requests. Large indexes are read one at a time, since reading takes
    ten times their memory.
    """

    def __init__(self) -> None:
        self._values = SharedValues[Stamped, OpenCheckpoint](count=_KEPT, kept_bytes=_KEPT_BYTES)
        self._large = threading.Lock()

    def open(self, found: FoundCheckpoint) -> OpenCheckpoint:
        """Return the checkpoint with its index.

        Raises UnavailableError if too many requests wait, and errors of formats and storage.
        """
        known = self._values.find(found.state)
        if known is not None:
            return known
        if found.is_large and self._values.waiting >= _MAX_WAITING:
            raise UnavailableError(
                "too many requests are reading large checkpoints; retry later", retry_seconds=5
            )
        return self._values.get(found.state, lambda: self._read(found))

    def _read(self, found: FoundCheckpoint) -> OpenCheckpoint:
        from dcp.storage.formats.opening import index_at

        with self._large if found.is_large else nullcontext():
            index = index_at(found.place)
        place = found.place
        return OpenCheckpoint(found.root, found.key, found.stamp, place.store, index, place.file)


def _find_checkpoint(root: StorageRoot, key: str) -> FoundCheckpoint:
    """List the files of a checkpoint. Raises CheckpointNotFoundError without files."""
    from dcp.storage.commit_names import is_commit_object

    place = root.place(key)
    if place.file is not None:
        info = place.store.stat(place.file)
        listing = [] if info is None else [info]
    else:
        listing = [
            info
            for info in place.store.list()
            if info.name not in _MOVING and not info.name.startswith(TEMPORARY_PREFIX)
        ]
    if not listing:
        raise CheckpointNotFoundError(f"{place.url} does not exist", path=place.url)
    digest = hashlib.sha256()
    for info in listing:
        digest.update(f"{info.name}\0{info.size_bytes}\0{info.modified_seconds!r}\n".encode())
    indexes = sum(info.size_bytes for info in listing if is_commit_object(info.name))
    return FoundCheckpoint(root.name, key, digest.hexdigest(), place, indexes > _LARGE_BYTES)


def _size_bytes(index: CheckpointIndex) -> int:
    import numpy as np

    values = vars(index).values()  # reads vars(): lazily decoded members stay undecoded
    total = sum(array.nbytes for array in values if isinstance(array, np.ndarray))
    total += sum(map(len, index.fqns)) + _NAME_BYTES * (len(index.fqns) + len(index.objects))
    return total + sum(len(value) for value in index.objects.values)


# -- for one caller ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Readable:
    """A checkpoint of the catalog with its root and its current index."""

    row: CheckpointDetail
    root: StorageRoot
    opened: OpenCheckpoint

    @contextmanager
    def problems(self) -> Iterator[None]:
        """Translate read errors to problems."""
        with _problems(self.root):
            yield


class _ProcessState:
    """State shared by byte requests of one process."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self.checkpoints = _OpenCheckpoints()
        self.streams = Streams(settings.max_downloads, settings.min_download_bytes_per_second)


def streams_of(service: Service) -> Streams:
    """Return the downloads of this process."""
    return service.own(_ProcessState).streams


class Data:
    """The bytes of checkpoints for one caller."""

    def __init__(self, service: Service, caller: Principal) -> None:
        self._service = service
        self._caller = caller
        self._shared = service.own(_ProcessState)

    @property
    def streams(self) -> Streams:
        """The downloads of this process."""
        return self._shared.streams

    def open(self, checkpoint_id: int) -> Readable:
        """Return the checkpoint ready for reading.

        Raises MissingError, GoneError and ConflictError (by its state), and problems of the storage.
        """
        row, root = self._place(checkpoint_id)
        with _problems(root):
            return Readable(row, root, self._shared.checkpoints.open(_find_checkpoint(root, row.key)))

    def find(self, checkpoint_id: int) -> FoundCheckpoint:
        """Return the checkpoint without reading its index. Raises like `open`."""
        row, root = self._place(checkpoint_id)
        with _problems(root):
            return _find_checkpoint(root, row.key)

    def answer(
        self,
        request: Request,
        found: Readable,
        body: Body,
        name: str,
        etag: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        share: Share | None = None,
    ) -> BodyResponse:
        """Return the requested range of ``body`` as a file called ``name``."""
        return BodyResponse(
            body,
            choose_range(request.headers, body.size_bytes, etag),
            self.streams,
            headers={"ETag": etag, "Content-Disposition": disposition(name), **headers},
            problem=found.root.problem,
            share=share or self.share(found),
        )

    def share(self, found: Readable) -> Share:
        """Return the caller's share of the downloads of this root."""
        subjects = subjects_of(self._caller.owner, self._caller.key_id, found.root.name)

        def find() -> Mapping[LimitSubject, Allowance] | None:
            with self._service.database.read() as connection:
                if not self._is_allowed(connection):
                    return None
                return self._service.allowances.of(subjects, connection)

        return Share(find)

    def _is_allowed(self, connection: Connection) -> bool:
        """Return True if the key or session of the caller still has its rights."""
        if not self._caller.is_admitted:
            return True
        return bool(self._service.callers.still_admitted(connection, [self._caller]))

    def _place(self, checkpoint_id: int) -> tuple[CheckpointDetail, StorageRoot]:
        with self._service.database.read() as connection:
            row = get_checkpoint(connection, checkpoint_id, self._caller.roots)
        if row.state in _GONE:
            raise GoneError(f"checkpoint {checkpoint_id}: {_GONE[row.state]}", state=row.state)
        if row.state in _NOT_YET:
            raise ConflictError(f"checkpoint {checkpoint_id}: {_NOT_YET[row.state]}", state=row.state)
        if row.root not in self._service.roots:
            raise GoneError(f"the root {row.root} is no longer configured")
        return row, self._service.roots.get(row.root)


@contextmanager
def _problems(root: StorageRoot) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise root.problem(error, is_known=True) from error
