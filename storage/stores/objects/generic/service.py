"""Any fsspec file system as an object service, by the operations that all of them have.

Whole objects by `pipe_file`, ranges by `cat_file`, larger files through `open`. What a file system promises
beyond that differs: exclusive creation is atomic where it has its own `pipe_file` for it. None of fsspec's
can compare and replace; in this process's memory a lock does it.
"""

from __future__ import annotations

import datetime
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any, Final

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from dcp.storage.errors import StorageError
from dcp.storage.stores.base import content_version
from dcp.storage.stores.handles import Buffer, Inflow
from dcp.storage.stores.objects.client import (
    ABSENT,
    Condition,
    Failure,
    ListingPage,
    ObjectInfo,
    RequestError,
    StreamClient,
)
from dcp.storage.stores.objects.generic.errors import as_request_error
from dcp.storage.stores.objects.options import ObjectOptions

__all__ = ["FsspecClient", "open_filesystem", "path_of", "place_of"]

_TAGS: Final = ("ETag", "etag", "generation", "md5Hash", "content_md5", "blob_id")
_TIMES: Final = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")

_MEMORY_LOCK: Final = threading.RLock()


def place_of(url: str) -> str:
    """The file system of ``url``, as fsspec tells it from others of its kind, without the path."""
    scheme = url.partition("://")[0]
    with _opening(url):
        return f"{scheme}://{sorted(fsspec.get_filesystem_class(scheme)._get_kwargs_from_urls(url).items())}"


def path_of(url: str) -> str:
    """The path of ``url`` in its file system."""
    with _opening(url):
        return str(fsspec.get_filesystem_class(url.partition("://")[0])._strip_protocol(url)).rstrip("/")


def open_filesystem(url: str, storage_options: Mapping[str, Any]) -> Any:
    """The file system of ``url``. Raises `StorageError` for what fsspec cannot open."""
    # Listings that are a minute old would show steps that are gone, and hide those just saved. Instances that
    # fsspec keeps it keeps for ever, each with its credentials.
    kept = {"use_listings_cache": False, "skip_instance_cache": True}
    with _opening(url, storage_options):
        return fsspec.core.url_to_fs(url, **kept, **storage_options)[0]


@contextmanager
def _opening(url: str, storage_options: Mapping[str, Any] | None = None) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise StorageError(
            f"{url} needs a package that is not installed: {error}", path=url, op="open"
        ) from error
    except Exception as error:  # some log in at once, and fail with errors of their own
        names = f" with options {', '.join(sorted(storage_options))}" if storage_options else ""
        raise StorageError(
            f"fsspec cannot open {url!r}{names}: {type(error).__name__}: {error}", path=url, op="open"
        ) from error


class FsspecClient(StreamClient):
    """Keys are the file system's own paths."""

    def __init__(self, filesystem: Any, options: ObjectOptions) -> None:
        protocol = filesystem.protocol
        super().__init__(f"{protocol if isinstance(protocol, str) else protocol[0]}://")
        self._fs = filesystem
        self._is_memory = isinstance(filesystem, MemoryFileSystem)
        self.has_folders = isinstance(filesystem, LocalFileSystem | MemoryFileSystem)
        # Only asynchronous file systems are made to be called by several threads.
        self.concurrency = options.concurrency if getattr(filesystem, "async_impl", False) else 2

    @property
    def replaces_conditionally(self) -> bool:
        """Only this process's memory does."""
        return self._is_memory

    @property
    def creates_conditionally(self) -> bool | None:
        """False where fsspec looks before it writes. None, to be tried, where the file system takes the
        argument: some ignore it."""
        if self._is_memory:
            return True
        method = getattr(type(self._fs), "_pipe_file", None) or type(self._fs).pipe_file
        if method is AbstractFileSystem.pipe_file:
            return False
        return None if "mode" in inspect.signature(method).parameters else False

    @property
    def identity(self) -> str:
        """What service this is."""
        return self.place

    def head(self, key: str) -> ObjectInfo:
        """`info`; without a tag where the file system has none (see `tag`)."""
        with self._attempt():
            return _info(key, self._fs.info(key))

    def tag(self, key: str) -> str:
        """The entity tag, or a digest of the content where there are none."""
        info = self.head(key)
        return info.etag or content_version(self.read(key, max(1, info.size_bytes))[0]).token

    def get(self, key: str, begin: int, inflow: Inflow, *, etag: str | None = None) -> ObjectInfo:
        """`cat_file` of the range, copied. A tag is not compared: there is no such request."""
        size = inflow.size_bytes
        with self._attempt():
            data = memoryview(self._fs.cat_file(key, start=begin, end=begin + size))
        if len(data) != size:
            total = self.head(key).size_bytes
            kind = Failure.RANGE if total < begin + size else Failure.PASSING
            raise RequestError(kind, f"{len(data)} bytes came instead of {size}; the file has {total}")
        for buffer in inflow.buffers():
            buffer[:] = data[: len(buffer)]
            data = data[len(buffer) :]
        return ObjectInfo(key, -1, 0.0, "")

    def read(self, key: str, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """`info`, then `cat_file`."""
        info = self.head(key)
        size = min(limit_bytes, info.size_bytes)
        if not size:
            return b"", info
        with self._attempt():
            data = bytes(self._fs.cat_file(key, start=0, end=size))
        if len(data) != size:
            raise RequestError(Failure.PASSING, f"{len(data)} bytes came instead of {size}")
        return data, info

    def put(self, key: str, data: Buffer, condition: Condition = None) -> str:
        """`pipe_file`, exclusively with `ABSENT`."""
        with _MEMORY_LOCK if self._is_memory else nullcontext():
            if isinstance(condition, str):
                self._compare(key, condition)
            with self._attempt():
                try:
                    mode = {"mode": "create"} if condition is ABSENT else {}
                    self._fs.pipe_file(key, bytes(data), **mode)
                except FileExistsError as error:
                    raise RequestError(Failure.CONDITION, f"{key} exists") from error
            return self.tag(key)

    def _compare(self, key: str, tag: str) -> None:
        try:
            found = self.tag(key)
        except RequestError as error:
            if error.kind is not Failure.MISSING:
                raise
            raise RequestError(Failure.CONDITION, f"{key} is gone") from error
        if found != tag:
            raise RequestError(Failure.CONDITION, f"{key} was replaced")

    def open_write(self, key: str) -> IO[bytes]:
        """A file to be written front to back; closing it makes the object."""
        with self._attempt():
            file: IO[bytes] = self._fs.open(key, "wb")
            return file

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns the errors of what is done with such a file into `RequestError`s."""
        with self._attempt():
            yield

    def discard(self, file: IO[bytes], key: str) -> None:
        """Throw such a file away, with what has been written of it."""
        with suppress(Exception):  # what it can throw away differs; in the end the object must not be there
            file.discard()  # type: ignore[attr-defined]
        if self.has_folders and not self._is_memory:
            file.close()
        elif not self._is_memory:
            file.closed = True  # type: ignore[misc]  # else the collector would close it, and so make the object
        with suppress(RequestError):
            self.delete([key])

    def list_page(self, prefix: str, *, shallow: bool, after: str | None) -> ListingPage:
        """`ls`, or `find` for what lies deeper; all in one page."""
        folder = prefix.rstrip("/")
        with self._attempt():
            self._fs.invalidate_cache(folder)
            try:
                if shallow:
                    entries = self._fs.ls(folder, detail=True)
                else:
                    entries = list(self._fs.find(folder, maxdepth=2, detail=True).values())
            except FileNotFoundError:
                return ListingPage([], [], None)
        files = [_info(_key(entry), entry) for entry in entries if entry["type"] == "file"]
        folders = [f"{_key(entry)}/" for entry in entries if entry["type"] == "directory"]
        return ListingPage(
            sorted((info for info in files if info.key.startswith(prefix)), key=lambda info: info.key),
            sorted(folder for folder in folders if folder.startswith(prefix)) if shallow else [],
            None,
        )

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """`rm_file`."""
        for key in keys:
            with self._attempt(), suppress(FileNotFoundError):
                self._fs.rm_file(key)
        return {}

    def make_folder(self, key: str) -> None:
        """`makedirs`, where folders are more than a part of names."""
        if self.has_folders:
            with self._attempt():
                self._fs.makedirs(key, exist_ok=True)

    def remove_folder(self, key: str) -> None:
        """`rmdir`, if it is empty."""
        if self.has_folders:
            with suppress(OSError):
                self._fs.rmdir(key)

    def folder_exists(self, key: str) -> bool:
        """Whether it is there, where folders are more than a part of names."""
        with self._attempt():
            return not self.has_folders or bool(self._fs.isdir(key))

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except RequestError:
            raise
        except Exception as error:
            raise as_request_error(error, self.place) from error


def _key(entry: Mapping[str, Any]) -> str:
    return str(entry["name"])


def _info(key: str, entry: Mapping[str, Any]) -> ObjectInfo:
    if entry.get("type") != "file":
        raise RequestError(Failure.MISSING, f"{key} is a {entry.get('type')}, not a file")
    tag = next((str(entry[name]) for name in _TAGS if entry.get(name)), "")
    return ObjectInfo(key, int(entry["size"]), _seconds(entry), tag)


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
