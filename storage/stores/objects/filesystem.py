"""fsspec stores: any fsspec file system, through operations common to all.

Small objects use `pipe_file`, ranges `cat_file`, larger files `open`. Exclusive creation is atomic only for
file systems with a `pipe_file` of their own. fsspec has no compare-and-replace; for in-process memory a
lock provides it.
"""

from __future__ import annotations

import datetime
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from operator import attrgetter
from typing import IO, Any, Final

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from dcp.storage.errors import StorageError
from dcp.storage.stores.base import FileInfo, Inflow, Version, WriteHandle, is_name
from dcp.storage.stores.objects.requests import Failure, RequestError, filesystem_failure
from dcp.storage.stores.objects.store import (
    ABSENT,
    ObjectInfo,
    ObjectStore,
    Page,
    files_of,
)

_TAGS: Final = ("ETag", "etag", "generation", "md5Hash", "content_md5", "blob_id")
_TIMES: Final = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
# Cached listings would show deleted steps and hide new steps. fsspec never drops cached instances and their
# credentials.
_UNCACHED: Final = {"use_listings_cache": False, "skip_instance_cache": True}
_MEMORY_LOCK: Final = threading.RLock()


class FsspecStore(ObjectStore):
    """Folder of an fsspec file system. ``storage_options`` are those of the file system plus
    `ObjectOptions`; keys are the file system's paths.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        scheme = url.partition("://")[0]
        if scheme not in fsspec.available_protocols() and scheme not in fsspec.registry:
            raise StorageError(
                "Cannot detect which StorageReader or StorageWriter to use: "
                f"neither dcp nor fsspec knows the scheme of {url!r}; use a path, file://, memory://, s3:// "
                "or another scheme of fsspec",
                path=url,
                op="open",
            )
        super().__init__(url, scheme, storage_options)

    @cached_property
    def prefix(self) -> str:  # type: ignore[override]  # computed on first access
        """Path of the folder."""
        with self._opening():
            path = fsspec.get_filesystem_class(self.place)._strip_protocol(self.url)
        return f"{str(path).rstrip('/')}/"

    @property
    def _filesystem(self) -> Any:
        return self.shared().client

    @property
    def _has_folders(self) -> bool:
        return isinstance(self._filesystem, LocalFileSystem | MemoryFileSystem)

    @property
    def _is_memory(self) -> bool:
        return isinstance(self._filesystem, MemoryFileSystem)

    def _identity_of_place(self) -> str:
        """Return the identity of the file system without the path, as defined by fsspec."""
        with self._opening():
            of_url = fsspec.get_filesystem_class(self.place)._get_kwargs_from_urls(self.url)
        return f"{self.place}://{sorted(of_url.items())}"

    def _make_client(self) -> tuple[Any, int]:
        given = self._filesystem_options
        with self._opening(*given):
            filesystem = fsspec.core.url_to_fs(self.url, **_UNCACHED, **given)[0]
        # Only asynchronous file systems support calls by several threads.
        return filesystem, self.options.concurrency if getattr(filesystem, "async_impl", False) else 2

    @contextmanager
    def _opening(self, *options: str) -> Iterator[None]:
        try:
            yield
        except ImportError as error:
            raise StorageError(
                f"{self.url} needs a package that is not installed: {error}", path=self.url, op="open"
            ) from error
        except Exception as error:  # e.g. a failed login
            names = f" with options {', '.join(sorted(options))}" if options else ""
            raise StorageError(
                f"fsspec cannot open {self.url!r}{names}: {type(error).__name__}: {error}",
                path=self.url,
                op="open",
            ) from error

    def _has_condition(self, *, creates: bool) -> bool | None:
        """Return True if files can be published under a condition, as for in-process memory.

        For creation: False if fsspec checks before writing, None (probe) if the file system accepts the
        argument, which some ignore.
        """
        if self._is_memory or not creates:
            return self._is_memory
        kind = type(self._filesystem)
        method = getattr(kind, "_pipe_file", None) or kind.pipe_file
        takes_mode = "mode" in inspect.signature(method).parameters
        return None if takes_mode and method is not AbstractFileSystem.pipe_file else False

    @contextmanager
    def attempt(self) -> Iterator[Any]:
        """Provide the file system and convert errors to `RequestError`."""
        try:
            yield self._filesystem
        except (RequestError, StorageError):
            raise
        except Exception as error:
            raise filesystem_failure(error, f"{self.place}://") from error

    def _head(self, key: str) -> ObjectInfo:
        with self.attempt() as filesystem:
            return _info(key, filesystem.info(key))

    def _tag(self, key: str) -> str:
        """Return the entity tag, or a digest of the content."""
        info = self._head(key)
        return info.etag or Version(self._start(key, max(1, info.size_bytes))[0]).token

    def _start(self, key: str, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        info = self._head(key)
        try:
            return self._range(key, 0, min(limit_bytes, info.size_bytes)), info
        except RequestError as error:
            if error.kind is not Failure.RANGE:
                raise
            # the file was replaced by a shorter file
            raise RequestError(Failure.PASSING, str(error)) from error

    def _get(self, key: str, begin: int, inflow: Inflow, etag: str | None) -> ObjectInfo:
        # Tags are not compared: fsspec has no such request.
        data = memoryview(self._range(key, begin, inflow.size_bytes))
        for buffer in inflow.buffers():
            buffer[:] = data[: len(buffer)]
            data = data[len(buffer) :]
        return ObjectInfo(key, -1, 0.0, "")

    def _range(self, key: str, begin: int, size: int) -> bytes:
        if not size:
            return b""
        with self.attempt() as filesystem:
            data = bytes(filesystem.cat_file(key, start=begin, end=begin + size))
        if len(data) != size:
            total = self._head(key).size_bytes
            kind = Failure.RANGE if total < begin + size else Failure.PASSING
            raise RequestError(kind, f"received {len(data)} of {size} bytes; the file has {total}")
        return data

    def _put(self, key: str, data: bytes, condition: str | None) -> str:
        with _MEMORY_LOCK if self._is_memory else nullcontext(), self.attempt() as filesystem:
            if condition not in (None, ABSENT):
                found = self._tag(key)
                if found != condition:
                    raise RequestError(Failure.CONDITION, f"{key} was replaced")
            try:
                filesystem.pipe_file(key, data, **({"mode": "create"} if condition is ABSENT else {}))
            except FileExistsError as error:
                raise RequestError(Failure.CONDITION, f"{key} exists") from error
            return self._tag(key)

    def _delete(self, key: str) -> None:
        with self.attempt() as filesystem, suppress(FileNotFoundError):
            filesystem.rm_file(key)

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> WriteHandle:
        """Create a file; the service reserves the name at once."""
        key = self.key_of(name)
        if replace:
            self.delete(name)
        elif self.stat(name) is not None:
            raise self.taken(name)
        file: IO[bytes] = self._run("open", key, lambda filesystem: filesystem.open(key, "wb"))
        return _StreamWriteHandle(self, name, file)

    def _run(self, op: str, key: str, act: Callable[[Any], Any]) -> Any:
        def attempt() -> Any:
            with self.attempt() as filesystem:
                return act(filesystem)

        return self.requests.run(op, key, attempt)

    # -- folders, where they are more than a part of names ---------------------------------------------------

    def make_root(self) -> None:
        """Call `makedirs`."""
        if self._has_folders:
            folder = self.prefix.rstrip("/")
            self._run("mkdir", folder, lambda filesystem: filesystem.makedirs(folder, exist_ok=True))

    def remove_root(self) -> None:
        """Call `rmdir`, if it is empty."""
        if self._has_folders:
            with suppress(OSError):
                self._filesystem.rmdir(self.prefix.rstrip("/"))

    def exists(self) -> bool:
        """Return True if the folder exists, or for file systems with prefixes only."""
        folder = self.prefix.rstrip("/")
        return not self._has_folders or bool(self._run("head", folder, lambda fs: fs.isdir(folder)))

    def walk(self) -> Iterator[tuple[str, FileInfo]]:
        """List by `find`: a single listing on most file systems."""
        page = self._list(self.prefix, lambda fs, folder: fs.find(folder, maxdepth=2, detail=True).values())
        return (
            (folder, info) for folder, info in files_of(page, self.prefix) if folder and "/" not in folder
        )

    def _pages(self, prefix: str, *, shallow: bool) -> Iterator[Page]:
        """List each folder separately."""
        page = self._list(prefix, lambda filesystem, folder: filesystem.ls(folder, detail=True))
        yield page
        if not shallow:
            for deeper in page[1]:
                if is_name(deeper[len(prefix) :].removesuffix("/")):
                    yield from self._pages(deeper, shallow=False)

    def _list(self, prefix: str, ask: Callable[[Any, str], Any]) -> Page:
        folder = prefix.rstrip("/")

        def act(filesystem: Any) -> list[Any]:
            filesystem.invalidate_cache(folder)
            try:
                return list(ask(filesystem, folder))
            except FileNotFoundError:
                return []

        entries = self._run("list", prefix, act)
        files = [_info(entry["name"], entry) for entry in entries if entry["type"] == "file"]
        folders = [f"{entry['name']}/" for entry in entries if entry["type"] == "directory"]
        return (
            sorted((info for info in files if info.key.startswith(prefix)), key=attrgetter("key")),
            sorted(folder for folder in folders if folder.startswith(prefix)),
        )


class _StreamWriteHandle(WriteHandle):
    """File object of the file system; closing creates the object."""

    def __init__(self, store: FsspecStore, name: str, file: IO[bytes]) -> None:
        super().__init__(name, store.path_of(name))
        self._store = store
        self._file = file

    def _append(self, view: memoryview) -> None:
        self._once("write", lambda: self._file.write(view))

    def _complete(self) -> None:
        self._once("close", self._file.close)

    def _once(self, op: str, act: Callable[[], object]) -> None:
        """Make a single attempt, because the progress of a failed attempt is unknown."""
        try:
            with self._store.attempt():
                act()
        except RequestError as error:
            raise StorageError(f"{op} of {self._path} failed: {error}", path=self._path, op=op) from error

    def _throw_away(self) -> None:
        with suppress(Exception):  # abort support varies; in the end the object must be absent
            self._file.discard()  # type: ignore[attr-defined]
        with suppress(RequestError), self._store.attempt() as filesystem:
            if isinstance(filesystem, LocalFileSystem):
                self._file.close()
            elif not isinstance(filesystem, MemoryFileSystem):
                self._file.closed = True  # type: ignore[misc]  # otherwise garbage collection would create the object
        with suppress(RequestError):
            self._store._delete(self._store.key_of(self.name))


def _info(key: str, entry: Mapping[str, Any]) -> ObjectInfo:
    if entry.get("type") != "file":
        raise RequestError(Failure.MISSING, f"{key} is a {entry.get('type')}, not a file")
    tag = next((str(entry[name]) for name in _TAGS if entry.get(name)), "")
    return ObjectInfo(str(key), int(entry["size"]), _seconds(entry), tag)


def _seconds(entry: Mapping[str, Any]) -> float:
    for name in _TIMES:
        value = entry.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.datetime.fromisoformat(value).timestamp()
    return 0.0
