"""Reading an object by ranges, into the caller's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from dcp.storage.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from dcp.storage.stores.handles import Inflow, ReadHandle, Views, byte_view
from dcp.storage.stores.objects.client import Failure, ObjectInfo
from dcp.storage.stores.objects.requests import Requests, ServiceError
from dcp.storage.stores.objects.shared import Shared, all_of

__all__ = ["REQUEST_BYTES", "ObjectReadHandle"]

REQUEST_BYTES: Final = 16 << 20
"""More than this is asked for by several requests at once."""


class ObjectReadHandle(ReadHandle):
    """An object that is the same one from the first read to the last: its entity tag is held on to.

    ``size_bytes`` is what the object must have, and compared with what the service says of it.
    """

    def __init__(
        self,
        name: str,
        path: str,
        key: str,
        size_bytes: int,
        etag: str | None,
        shared: Callable[[], Shared],
        requests: Requests,
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._path = path
        self._key = key
        self._etag = etag
        self._shared = shared
        self._requests = requests
        self._lock = threading.Lock()
        self._is_closed = False

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """One request, or for more than `REQUEST_BYTES` several."""
        if self._is_closed:
            raise ValueError(f"{self._path} is closed: it cannot be read any more")
        views = [view for buffer in buffers if len(view := byte_view(buffer))]
        size = sum(map(len, views))
        if not size:
            return
        if offset + size > self.size_bytes:
            raise self._too_short(self.size_bytes, offset + size)
        tasks = [partial(self._get, Views(part), begin) for part, begin in _split(views, offset)]
        all_of(self._shared().threads, tasks, self._requests.interrupt)

    def receive(self, inflow: Inflow, offset: int) -> None:
        """One request, whatever its size."""
        if self._is_closed:
            raise ValueError(f"{self._path} is closed: it cannot be read any more")
        if offset + inflow.size_bytes > self.size_bytes:
            raise self._too_short(self.size_bytes, offset + inflow.size_bytes)
        self._get(inflow, offset)

    def pread(self, length: int, offset: int) -> bytes:
        """As `preadv`, into new memory."""
        if offset + length > self.size_bytes and length:  # before memory for it is taken
            raise self._too_short(self.size_bytes, offset + length)
        data = bytearray(length)
        self.preadv([memoryview(data)], offset)
        return bytes(data)

    def close(self) -> None:
        """Connections belong to the client, so there is nothing else to release."""
        self._is_closed = True

    def _get(self, inflow: Inflow, begin: int) -> None:
        size = inflow.size_bytes
        client = self._shared().client
        try:
            info = self._requests.run(
                "get",
                self._key,
                lambda: client.get(self._key, begin, inflow, etag=self._etag),
                received_bytes=size,
            )
        except ServiceError as error:
            raise self._explained(error, begin + size) from error
        self._compare(info)

    def _compare(self, info: ObjectInfo) -> None:
        """Whether what has just come is of the object that was opened, and that it has the size it must."""
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

    def _explained(self, error: ServiceError, end: int) -> Exception:
        if error.kind is Failure.MISSING:
            return CheckpointNotFoundError(f"{self._path} does not exist", path=self._path)
        if error.kind is Failure.CONDITION:
            return self._replaced()
        if error.kind is Failure.RANGE:
            return self._too_short(None, end)
        return StorageError(f"{self._path}: {error}", path=self._path, op="get")

    def _too_short(self, size_bytes: int | None, wanted_bytes: int) -> CorruptCheckpointError:
        at = f"at byte {size_bytes}" if size_bytes is not None else "before that"
        return CorruptCheckpointError(
            f"{self._path}: the checkpoint has data up to byte {wanted_bytes}, but the object ends {at}; it "
            "was truncated or replaced",
            path=self._path,
            size_bytes=size_bytes,
            wanted_bytes=wanted_bytes,
        )

    def _replaced(self) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path} was replaced while it was read; load again", path=self._path
        )


def _split(views: list[memoryview], offset: int) -> list[tuple[list[memoryview], int]]:
    """``views`` in parts of at most `REQUEST_BYTES`, each with the offset at which it begins."""
    parts: list[tuple[list[memoryview], int]] = []
    part: list[memoryview] = []
    begin, room = offset, REQUEST_BYTES
    for view in views:
        rest = view
        while len(rest):
            piece = rest[:room]
            part.append(piece)
            room -= len(piece)
            rest = rest[len(piece) :]
            if not room:
                parts.append((part, begin))
                begin += REQUEST_BYTES
                part, room = [], REQUEST_BYTES
    if part:
        parts.append((part, begin))
    return parts
