"""Object store base class: `ObjectStore` and the requests that each service implements.

A folder is a prefix of keys, a file an object. A file appears with the last request of the upload. Nothing
is renamed or copied. The conditional publish of the manifest makes a commit atomic; `dcp.storage.commit`
explains why no lock is needed.

Every step of a run has a store object, while sessions with a service are expensive. Clients with
connections, threads and buffers are therefore shared by all stores of a place. The clients of the last few
places stay open. Credentials belong to the place: new credentials get new sessions.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeVar
from weakref import WeakSet, WeakValueDictionary

from dcp.storage.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from dcp.storage.stores.base import (
    ANY,
    Capabilities,
    Expected,
    FileInfo,
    Inflow,
    ReadHandle,
    ReadProfile,
    Store,
    Version,
    Views,
    byte_view,
    check_name,
    is_name,
)
from dcp.storage.stores.objects.requests import Failure, RequestError, Requests
from dcp.storage.threads import result_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_BYTES: Final = 16 << 20
"""Maximum size of a request; larger reads use parallel requests."""

_GAP_BYTES: Final = 256 << 10
_JOINED_BYTES: Final = 8 << 20
"""Scratch memory per thread for joined reads."""

ABSENT: Final = "*"
"""Condition of a new key. Other conditions are the entity tag of the present object, or None for no
condition.
"""

_MISSING: Final = frozenset({Failure.MISSING})
_REFUSED: Final = frozenset({Failure.MISSING, Failure.CONDITION})
_UNREADABLE: Final = frozenset({Failure.MISSING, Failure.CONDITION, Failure.RANGE})


ConditionalWrites = Literal["auto", "trust", "off"]
"""Protection against concurrent commits. "auto" uses the service's conditional writes, probed once unless
known to work; "trust" skips the probe; "off" checks and then writes, which is safe only with one writer.
"""


def _default_concurrency() -> int:
    return max(8, min(16, 4 * len(os.sched_getaffinity(0))))


@dataclass(frozen=True, kw_only=True)
class ObjectOptions:
    """Options in ``storage_options`` beside those of the file system.

    - ``conditional_writes``: see `ConditionalWrites`.
    - ``retry_seconds``: time to repeat transient failures (throttling, timeouts, resets, server errors); 0
      disables retries.
    - ``request_timeout_seconds``: wait for the next bytes of one attempt.
    - ``concurrency``: parallel requests of a store; by default 4 per core, from 8 to 16.
    - ``part_bytes``: size of upload parts; larger for files with too many parts. Uploads use
      ``concurrency * part_bytes`` of memory.
    """

    conditional_writes: ConditionalWrites = "auto"
    retry_seconds: float = 120.0
    request_timeout_seconds: float = 60.0
    concurrency: int = field(default_factory=_default_concurrency)
    part_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("retry_seconds", "request_timeout_seconds", "concurrency", "part_bytes"):
            value, whole = getattr(self, name), name in ("concurrency", "part_bytes")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number of seconds"
                raise StorageError(f"storage option {name} must be {kind}, not a {type(value).__name__}")
        if self.conditional_writes not in ("auto", "trust", "off"):
            raise StorageError(
                "storage option conditional_writes must be 'auto', 'trust' or 'off', not "
                f"{self.conditional_writes!r}"
            )
        if self.concurrency < 1 or self.part_bytes < 5 << 20 or self.part_bytes % 4096:
            raise StorageError(
                "storage options: concurrency must be at least 1, and part_bytes a multiple of 4096 of at "
                f"least 5 MiB: {self.concurrency=}, {self.part_bytes=}"
            )
        if self.retry_seconds < 0 or self.request_timeout_seconds <= 0:
            raise StorageError(
                "storage options: retry_seconds must be at least 0 and request_timeout_seconds above 0: "
                f"{self.retry_seconds=}, {self.request_timeout_seconds=}"
            )


class Part:
    """Memory of an upload part."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)


_PARTS: Final[WeakSet[Part]] = WeakSet()


@dataclass
class SharedClient:
    """Client and request threads shared by stores of a place.

    ``heeds_conditions``: result of the probe for creation (True) and replacement (False), run by one thread
    at a time.
    """

    client: Any
    options: ObjectOptions
    threads: ThreadPoolExecutor
    heeds_conditions: dict[bool, bool] = field(default_factory=dict)
    trying: threading.Lock = field(default_factory=threading.Lock)

    def part(self, size_bytes: int, *, is_first: bool) -> Part | None:
        """Return memory for a part; None if all parts reach the limit of `ObjectOptions` and ``is_first``
        is False. Unreferenced parts are freed.
        """
        with _guard:
            taken = sum(len(part.data) for part in _PARTS)
            limit = max(2 * size_bytes, self.options.concurrency * self.options.part_bytes)
            if not is_first and taken + size_bytes > limit:
                return None
            part = Part(size_bytes)
            _PARTS.add(part)
            return part


_KEPT_PLACES: Final = 4
"""Number of unused places whose clients are kept for the next step of a run."""

_Key = tuple[int, str]
_ALIVE: Final[WeakValueDictionary[_Key, SharedClient]] = WeakValueDictionary()
_KEPT: Final[OrderedDict[_Key, SharedClient]] = OrderedDict()
_guard = threading.RLock()  # garbage collection may run code that opens a store


def _start_afresh() -> None:
    global _guard
    _guard = threading.RLock()  # a thread missing in the child may hold the old lock
    _PARTS.clear()  # parts belong to files of the parent


os.register_at_fork(after_in_child=_start_afresh)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Object of a listing; ``etag`` changes with the content, and is empty in listings of some services."""

    key: str
    size_bytes: int
    modified_seconds: float
    etag: str


Page: TypeAlias = tuple[list[ObjectInfo], list[str]]
"""Part of a listing: objects, and common prefixes ending with ``/``."""


class ObjectStore(Store):
    """Files below a prefix of keys. The folder needs no creation; files are durable after the service's
    answer.

    Stores of a place share connections; pickled or forked stores open new connections at the first
    operation. `publish` is atomic between processes by conditional requests, or refused without them unless
    ``conditional_writes="off"``. `lock` excludes only threads of one process.

    A subclass implements single requests, which `requests` retries and which fail with `RequestError`.
    """

    capabilities = Capabilities(lists_folders=True, lists_tree=True)
    prefix: str
    """Common prefix of all keys."""
    streams_bodies: ClassVar[bool] = False
    """True if bodies are received into place, without memory proportional to the request."""

    def __init__(self, url: str, place: str, storage_options: Mapping[str, Any] | None) -> None:
        if "::" in url:
            raise StorageError(f"{url}: chained URLs of fsspec (::) are not supported", path=url, op="open")
        self.url = url.rstrip("/")
        self._given = dict(storage_options or {})
        self._filesystem_options = dict(self._given)
        names = ObjectOptions.__dataclass_fields__.keys() & self._given.keys()
        self.options = ObjectOptions(**{name: self._filesystem_options.pop(name) for name in names})
        self.place = place
        self.requests = Requests(self.url, place, self.options.retry_seconds)
        self._found: tuple[int, SharedClient | None] = 0, None
        self.read_profile = ReadProfile(
            threads=self.options.concurrency,
            # Fewer and larger requests cost less; a gigabyte still gives one request per thread.
            request_bytes=4 * REQUEST_BYTES if self.streams_bodies else REQUEST_BYTES,
            join_below_bytes=_JOINED_BYTES,
            gap_bytes=_GAP_BYTES,
            scatter=True,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.url, self._given)

    # -- requests of each kind of service --------------------------------------------------------------------

    @abstractmethod
    def _make_client(self) -> tuple[Any, int]:
        """Return the shared client and a sensible number of parallel requests."""

    @abstractmethod
    def _has_condition(self, *, creates: bool) -> bool | None:
        """Return True if conditional creation (or replacement) is atomic, False if not, None to probe."""

    @abstractmethod
    def _head(self, key: str) -> ObjectInfo:
        """Return size and tag of an object; `Failure.MISSING` if absent."""

    @abstractmethod
    def _start(self, key: str, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """Return up to ``limit_bytes`` (at least 1) from the start of an object; the info has the full
        size.
        """

    @abstractmethod
    def _get(self, key: str, begin: int, inflow: Inflow, etag: str | None) -> ObjectInfo:
        """Fill all buffers of ``inflow`` from byte ``begin``.

        Fails with `Failure.RANGE` beyond the end, `Failure.CONDITION` for another tag than ``etag``,
        `Failure.PASSING` for a short body. Nothing is written to the buffers after the return. The returned
        size is -1 and the tag empty if unknown.
        """

    @abstractmethod
    def _put(self, key: str, data: bytes, condition: str | None) -> str:
        """Put a whole object under ``condition`` (else `Failure.CONDITION`) and return the entity tag."""

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Delete an object; a missing object succeeds or fails with `Failure.MISSING`."""

    @abstractmethod
    def _pages(self, prefix: str, *, shallow: bool) -> Iterator[Page]:
        """Yield the objects below ``prefix`` by retried requests.

        ``shallow``: only objects without a further ``/``, plus common prefixes up to the next ``/``.
        """

    def _tag(self, key: str) -> str:
        """Return the entity tag of an object; `Failure.MISSING` if absent."""
        return self._head(key).etag

    # -- folders ---------------------------------------------------------------------------------------------

    def list(self) -> list[FileInfo]:
        """List the files: one request per thousand files on S3."""
        pages = self._pages(self.prefix, shallow=True)
        found = [info for page in pages for folder, info in files_of(page, self.prefix) if not folder]
        return sorted(found, key=attrgetter("name"))

    def folders(self) -> Sequence[str]:
        """Return the sorted names of folders directly below."""
        start = len(self.prefix)
        pages = self._pages(self.prefix, shallow=True)
        found = {deeper[start:].removesuffix("/") for _, prefixes in pages for deeper in prefixes}
        return sorted(filter(is_name, found))

    def tree(self) -> Iterator[tuple[str, FileInfo]]:
        """List all files below in a single listing."""
        for page in self._pages(self.prefix, shallow=False):
            yield from files_of(page, self.prefix)

    # -- small files -----------------------------------------------------------------------------------------

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time of a file, by one request."""
        info = self.look(self.key_of(name))
        return None if info is None else FileInfo(name, info.size_bytes, info.modified_seconds)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Read in one request up to `REQUEST_BYTES`, in parallel requests beyond."""
        data, info = self._first(name, max(1, min(limit_bytes, REQUEST_BYTES)))
        if info.size_bytes > limit_bytes:
            raise self.too_large(name, info.size_bytes, limit_bytes)
        if len(data) >= info.size_bytes:
            return data
        whole = bytearray(info.size_bytes)
        whole[: len(data)] = data
        ObjectReadHandle(self, name, info).preadv([memoryview(whole)[len(data) :]], len(data))
        return bytes(whole)

    def read_start(self, name: str, size_bytes: int) -> tuple[bytes, int]:
        """Read the start in one request of at most `REQUEST_BYTES`."""
        data, info = self._first(name, min(size_bytes, REQUEST_BYTES))
        return data, info.size_bytes

    def _first(self, name: str, size_bytes: int) -> tuple[bytes, ObjectInfo]:
        key = self.key_of(name)
        found = self._unless_missing("get", key, lambda: self._start(key, size_bytes))
        if found is None:
            raise self.absent(name)
        return found

    def version(self, name: str) -> Version | None:
        """Return the entity tag, or a digest of the content without tags."""
        key = self.key_of(name)
        tag = self._unless_missing("head", key, lambda: self._tag(key))
        return None if tag is None else Version(f"etag:{tag}")

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Expected = ANY) -> Version:
        """Publish by a conditional request; see `ConditionalWrites`."""
        key = self.key_of(name)
        condition = None if expected is ANY else ABSENT
        if isinstance(expected, Version):
            kind, _, condition = expected.token.partition(":")
            if kind != "etag" or not condition:  # not a version of this store: cannot match
                raise self.conflict(name)
        if condition is not None and not self._compares(creates=condition is ABSENT):
            if self.version(name) != (expected if isinstance(expected, Version) else None):
                raise self.conflict(name)
            condition = None
        try:
            return Version(f"etag:{self.put(key, data, condition)}")
        except RequestError as error:
            # After a lost answer and a retry, the content may be ours. The size
            # proves nothing: manifests of one model have equal sizes.
            version = self.version(name) if error.is_ambiguous else None
            if version is not None and self._holds(name, data):
                return version
            if error.kind is Failure.CONDITION or condition not in (
                None,
                ABSENT,
            ):  # the previous content is gone
                raise self.conflict(name) from error
            path = self.path_of(name)
            raise StorageError(f"{path}: {error}", path=path, op="publish") from error

    def put(self, key: str, data: bytes, condition: str | None) -> str:
        """Put an object and return the entity tag; `RequestError` if ``condition`` does not hold."""
        put = partial(self._put, key, data, condition)
        return self.requests.run("put", key, put, answers=_REFUSED, sent_bytes=len(data))

    def _holds(self, name: str, data: bytes) -> bool:
        """Return True if the file has the content ``data``; the file may be longer or missing."""
        try:
            return self.read(name, limit_bytes=len(data)) == data
        except (CheckpointFormatError, CheckpointNotFoundError):
            return False

    def delete(self, name: str) -> None:
        """Delete by one request."""
        key = self.key_of(name)
        self._unless_missing("delete", key, lambda: self._delete(key))

    # -- data files ------------------------------------------------------------------------------------------

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Open a file; with a known size, S3 needs no request."""
        key = self.key_of(name)
        if expected_bytes is not None and self.streams_bodies:
            return ObjectReadHandle(self, name, ObjectInfo(key, expected_bytes, 0.0, ""))
        info = self.look(key)
        if info is None:
            raise self.absent(name)
        return ObjectReadHandle(self, name, info)

    def traffic(self) -> dict[str, float]:
        """Return counters of this store: "requests" counts attempts, "retries" repeated attempts."""
        return self.requests.traffic()

    # -- within ----------------------------------------------------------------------------------------------

    def shared(self) -> SharedClient:
        """Return the client of this place and these options in this process."""
        pid, found = self._found
        if found is not None and pid == os.getpid():
            return found
        given = sorted(self._filesystem_options.items(), key=itemgetter(0))
        key = os.getpid(), f"{self._identity_of_place()}\n{self.options}\n{given!r}"
        with _guard:
            found = _ALIVE.get(key)
            if found is None:
                client, concurrency = self._make_client()
                threads = ThreadPoolExecutor(concurrency, thread_name_prefix="dcp-object")
                found = _ALIVE[key] = SharedClient(client, self.options, threads)
            _KEPT[key] = found
            _KEPT.move_to_end(key)
            while len(_KEPT) > _KEPT_PLACES:
                _KEPT.popitem(last=False)
        self._found = os.getpid(), found
        return found

    def _identity_of_place(self) -> str:
        return self.place

    def key_of(self, name: str) -> str:
        """Return the key of a file."""
        return f"{self.prefix}{check_name(name)}"

    def look(self, key: str) -> ObjectInfo | None:
        """Return size and tag of an object; None if absent."""
        return self._unless_missing("head", key, lambda: self._head(key))

    def _unless_missing(self, op: str, key: str, attempt: Callable[[], T]) -> T | None:
        try:
            return self.requests.run(op, key, attempt, answers=_MISSING)
        except RequestError:
            return None

    def _compares(self, *, creates: bool) -> bool:
        """Return True if the service compares conditions, False if the user switched comparison off.

        Many S3-like services ignore unknown conditions, and two writers would both succeed. Unknown
        services are therefore probed once per shared client.

        Raises:
            StorageError: If the service ignores conditions and comparison is on.
        """
        if self.options.conditional_writes != "auto":
            return self.options.conditional_writes == "trust"
        try:
            known = self._has_condition(creates=creates)
        except RequestError as error:  # from the client, which cannot identify the service
            raise StorageError(f"{self.url}: {error}", path=self.url, op="publish") from error
        if known is None:
            shared = self.shared()
            heeds = shared.heeds_conditions
            with shared.trying:
                if creates not in heeds:
                    heeds[creates] = self._heeds_condition(ABSENT if creates else f'"{"0" * 32}"')
            known = heeds[creates]
        if not known:
            what = "create-only writes" if creates else "compare-and-replace writes"
            raise StorageError(
                f"{self.url}: {self.place} does not support conditional requests ({what}), so two writers to "
                "one id could mix their checkpoints. If only one job writes there, pass "
                'storage_options={"conditional_writes": "off"}',
                path=self.url,
                op="publish",
            )
        return True

    def _heeds_condition(self, wrong: str) -> bool:
        """Probe the service: write to a temporary key under a false condition, and return True if refused."""
        key = f"{self.prefix}.dcp-probe-{uuid.uuid4().hex}"
        try:
            self.put(key, b"1", None)
            try:
                self.put(key, b"2", wrong)
            except RequestError as error:
                return error.kind is Failure.CONDITION
            return False
        finally:
            try:
                self._unless_missing("delete", key, lambda: self._delete(key))
            except StorageError as error:  # no permission to delete, which commits do not need
                logger.debug("%s could not be deleted: %s", key, error)


def files_of(page: Page, prefix: str) -> Iterator[tuple[str, FileInfo]]:
    """Yield (folder relative to ``prefix``, file) for names valid in checkpoints; "" is the prefix itself."""
    for info in page[0]:
        folder, _, name = info.key[len(prefix) :].rpartition("/")
        if is_name(name) and (not folder or all(map(is_name, folder.split("/")))):
            yield folder, FileInfo(name, info.size_bytes, info.modified_seconds)


class ObjectReadHandle(ReadHandle):
    """Object pinned by the entity tag of the first read.

    ``size_bytes`` is the expected size, compared with the service's answers.
    """

    def __init__(self, store: ObjectStore, name: str, info: ObjectInfo) -> None:
        self.name = name
        self.size_bytes = info.size_bytes
        self._store = store
        self._path = store.path_of(name)
        self._key = info.key
        self._etag = info.etag or None
        self._lock = threading.Lock()
        self._is_closed = False

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Read in one request up to `REQUEST_BYTES`, in several beyond."""
        views = [view for buffer in buffers if len(view := byte_view(buffer))]
        self._check(sum(map(len, views)), offset)
        tasks = [partial(self._get, Views(part), begin) for part, begin in _split(views, offset)]
        if len(tasks) == 1:
            tasks[0]()
            return
        threads = self._store.shared().threads
        futures = [threads.submit(copy_context().run, task) for task in tasks]
        try:
            for future in futures:
                result_of(future)
        except BaseException as error:
            if not isinstance(error, Exception):  # the caller was interrupted: cancel the other requests
                self._store.requests.interrupt()
            raise
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def receive(self, inflow: Inflow, offset: int) -> None:
        """Read in one request of any size."""
        self._check(inflow.size_bytes, offset)
        self._get(inflow, offset)

    def pread(self, length: int, offset: int) -> bytes:
        """Read as `preadv`, into new memory."""
        self._check(length, offset)  # before memory is allocated
        return super().pread(length, offset)

    def close(self) -> None:
        """Do nothing, because connections belong to the store."""
        self._is_closed = True

    def _check(self, size: int, offset: int) -> None:
        if self._is_closed:
            raise ValueError(f"{self._path} is closed and cannot be read")
        if size and offset + size > self.size_bytes:
            raise self._too_short(self.size_bytes, offset + size)

    def _get(self, inflow: Inflow, begin: int) -> None:
        get = partial(self._store._get, self._key, begin, inflow, self._etag)
        size = inflow.size_bytes
        try:
            info = self._store.requests.run("get", self._key, get, answers=_UNREADABLE, received_bytes=size)
        except RequestError as error:
            if error.kind is Failure.MISSING:
                raise CheckpointNotFoundError(f"{self._path} does not exist", path=self._path) from error
            if error.kind is Failure.CONDITION:
                raise self._replaced() from error
            raise self._too_short(None, begin + size) from error
        with self._lock:
            if self._etag is None:
                self._etag = info.etag or None
            if info.etag and info.etag != self._etag:
                raise self._replaced()
        if info.size_bytes not in (-1, self.size_bytes):
            raise CorruptCheckpointError(
                f"{self._path} has {info.size_bytes} bytes, {self.size_bytes} were committed; it was "
                "truncated, replaced or extended",
                path=self._path,
                size_bytes=info.size_bytes,
            )

    def _too_short(self, size_bytes: int | None, wanted_bytes: int) -> CorruptCheckpointError:
        ends = "before that" if size_bytes is None else f"at byte {size_bytes}"
        return CorruptCheckpointError(
            f"{self._path}: the checkpoint has data up to byte {wanted_bytes}, but the object ends "
            f"{ends}: it was truncated or replaced; load another checkpoint",
            path=self._path,
            size_bytes=size_bytes,
            wanted_bytes=wanted_bytes,
        )

    def _replaced(self) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path} was replaced while it was read; load again", path=self._path
        )


def _split(views: Sequence[memoryview], offset: int) -> Iterator[tuple[list[memoryview], int]]:
    """Yield ``views`` in parts of at most `REQUEST_BYTES` with the offset of each part."""
    part: list[memoryview] = []
    size = 0
    for view in views:
        rest = view
        while len(rest):
            piece, rest = rest[: REQUEST_BYTES - size], rest[REQUEST_BYTES - size :]
            part.append(piece)
            size += len(piece)
            if size == REQUEST_BYTES:
                yield part, offset
                part, size, offset = [], 0, offset + size
    if part:
        yield part, offset
