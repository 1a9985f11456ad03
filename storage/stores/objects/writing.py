"""Writing an object front to back: in parts that are sent at once, or through a file object."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from typing import IO, Final

from isal.isal_zlib import crc32

from dcp.storage.errors import CheckpointConflictError, StorageError
from dcp.storage.stores.buffers import BounceBuffer, copy_bytes
from dcp.storage.stores.handles import Buffer, WriteHandle, byte_view
from dcp.storage.stores.objects.client import (
    ABSENT,
    Condition,
    Failure,
    ObjectInfo,
    PartsClient,
    RequestError,
    StreamClient,
    Upload,
)
from dcp.storage.stores.objects.requests import Requests, ServiceError
from dcp.storage.stores.objects.shared import Shared
from dcp.storage.threads import clearing_up, result_of

__all__ = ["PartsWriteHandle", "StreamWriteHandle", "part_bytes_for"]

logger = logging.getLogger(__name__)

_MAX_PARTS: Final = 10_000
_PLANNED_PARTS: Final = 4_000
_GROW_AFTER_PARTS: Final = 5_000
_LARGEST_PART_BYTES: Final = 1 << 30


def part_bytes_for(expected_bytes: int | None, least_bytes: int) -> int:
    """Size of parts so that a file of ``expected_bytes`` stays far below the 10,000 that S3 allows."""
    size = least_bytes
    while expected_bytes and size * _PLANNED_PARTS < expected_bytes and size < _LARGEST_PART_BYTES:
        size *= 2
    return size


class _ObjectWriteHandle(WriteHandle):
    """What both kinds have in common: the position, and the states open, finished and aborted."""

    def __init__(self, name: str, path: str, key: str, requests: Requests) -> None:
        self.name = name
        self._path = path
        self._key = key
        self._requests = requests
        self._position = 0
        self._state = "open"

    @property
    def position(self) -> int:
        return self._position

    def write(self, data: Buffer) -> None:
        self._check_open()
        view = byte_view(data)
        self._append(view)
        self._position += len(view)

    def finish(self) -> int:
        if self._state != "finished":
            self._check_open()
            self._complete()
            self._state = "finished"
        return self._position

    def abort(self) -> None:
        if self._state == "open":
            self._state = "aborted"
            self._throw_away()

    @abstractmethod
    def _append(self, view: memoryview) -> None: ...

    @abstractmethod
    def _complete(self) -> None: ...

    @abstractmethod
    def _throw_away(self) -> None: ...

    def _check_open(self) -> None:
        if self._state != "open":
            raise ValueError(f"{self._path} is {self._state}: nothing can be written to it any more")

    def _exists(self) -> StorageError:
        return StorageError(
            f"{self._path} exists already: data files are never overwritten", path=self._path, op="create"
        )

    def _ended(self) -> CheckpointConflictError:
        """Of uploads that it did not begin a writer only ends those of saves that it has beaten."""
        return CheckpointConflictError(
            f"the upload of {self._path} was ended by somebody: another writer has finished at this place, "
            "or a clean-up removed what it took for remains of a killed one; nothing of this one is kept",
            path=self._path,
        )


class PartsWriteHandle(_ObjectWriteHandle):
    """Parts are assembled in pooled buffers, and sent while the next ones fill.

    A file that fits into one part is one request, at the end. The object appears at the end only, if
    ``condition`` holds then: else `finish` raises `StorageError`, and `finish_as` what the service said.
    With ``replace`` there may be one of that name before.
    """

    def __init__(
        self,
        name: str,
        path: str,
        key: str,
        requests: Requests,
        shared: Shared,
        client: PartsClient,
        *,
        condition: Condition = ABSENT,
        expected_bytes: int | None = None,
        replace: bool = False,
    ) -> None:
        super().__init__(name, path, key, requests)
        self._shared = shared
        self._client = client
        self._condition = condition
        self._replace = replace
        self._replaced: ObjectInfo | None = None
        self._pool = shared.pool(part_bytes_for(expected_bytes, shared.options.part_bytes))
        self._buffer: BounceBuffer | None = None
        self._filled = 0
        self._upload: Upload | None = None
        self._sent: deque[tuple[Future[object], Callable[[], None]]] = deque()
        self._parts: list[object] = []
        self._count = 0
        self._begun = 0
        self._called_off = threading.Event()

    def _append(self, view: memoryview) -> None:
        while len(view):
            if self._buffer is None:
                self._buffer = self._take()
            room = self._buffer.view[self._filled : self._filled + len(view)]
            copy_bytes(room, view[: len(room)])
            self._filled += len(room)
            view = view[len(room) :]
            if self._filled == len(self._buffer.view):
                self._send()

    def _take(self) -> BounceBuffer:
        """A free buffer; waits for one of our own parts, never for those of another file."""
        while True:
            buffer = self._pool.try_take()
            if buffer is not None:
                return buffer
            if not self._sent:
                return self._pool.take()
            self._reap()

    def _reap(self) -> None:
        """Wait for the oldest part under way; raises what kept it from being stored.

        Until it has ended it stays among those under way, so that an interrupted wait leaves it to `abort`.
        """
        self._parts.append(result_of(self._sent[0][0]))
        self._sent.popleft()

    def _send(self) -> None:
        """Hand the buffer on to a thread."""
        buffer, size = self._buffer, self._filled
        if buffer is None:
            return
        while self._sent and self._sent[0][0].done():
            self._reap()
        if self._upload is None:
            self._upload = self._begin()
        self._buffer, self._filled = None, 0
        self._count += 1
        if self._count >= _MAX_PARTS:
            self._pool.give(buffer)
            raise StorageError(
                f"{self._path} grows beyond {_MAX_PARTS} parts; give `create` the expected size, or a larger "
                "part_bytes",
                path=self._path,
                op="put_part",
            )
        pool = self._pool
        give_back = partial(pool.give, buffer)  # to where it came from, while larger ones are taken already
        put = partial(self._put, self._upload, self._count, buffer.view[:size], give_back)
        sent = self._shared.threads.submit(copy_context().run, put)
        self._sent.append((sent, give_back))
        if self._count % _GROW_AFTER_PARTS == 0 and pool.size_bytes < _LARGEST_PART_BYTES:
            self._pool = self._shared.pool(4 * pool.size_bytes)

    def _begin(self) -> Upload:
        def attempt() -> Upload:
            self._begun += 1
            return self._client.begin_upload(self._key)

        return self._requests.run("begin_upload", self._key, attempt)

    def _abort_strangers(self) -> None:
        """End the uploads of our name that began without an answer: nobody knows of them, somebody pays.

        Names are used once, so whatever uploads there are to this one are ours, and at the end none is used.
        """
        if self._begun < 2:
            return
        client, key = self._client, self._key
        try:
            for upload in self._requests.run("list_uploads", key, lambda: client.uploads(key)):
                if upload.key == key:
                    self._requests.run("abort_upload", key, partial(client.abort_upload, upload))
        except (StorageError, ServiceError) as error:
            logger.warning("%s: an unfinished upload may stay behind: %s", self._path, error)

    def _put(self, upload: Upload, number: int, data: memoryview, give_back: Callable[[], None]) -> object:
        try:
            crc = crc32(data)
            return self._requests.run(
                "put_part",
                upload.key,
                lambda: self._client.put_part(upload, number, data, crc),
                sent_bytes=len(data),
                called_off=self._called_off,
            )
        except ServiceError as error:
            raise self._ended() from error
        finally:
            give_back()

    def _complete(self) -> None:
        if self._replace:
            self._replaced = self._look()
        try:
            self.finish_as()
        except ServiceError as error:
            if error.is_ambiguous and self._is_there():
                self._settle()
                return
            if error.kind is Failure.CONDITION:
                raise self._exists() from error
            if error.kind is Failure.MISSING and self._upload is not None:
                raise self._ended() from error
            raise StorageError(f"{self._path}: {error}", path=self._path, op="finish") from error

    def finish_as(self) -> str:
        """Finish, and return the entity tag. Raises `ServiceError` if ``condition`` does not hold, or if that
        is how a request looks that was repeated because its answer was lost."""
        etag = self._put_whole() if self._upload is None else self._put_together()
        self._settle()
        return etag

    def _settle(self) -> None:
        self._state = "finished"
        self._release()
        self._abort_strangers()

    def _put_whole(self) -> str:
        client, key, condition = self._client, self._key, self._condition
        data = self._buffer.view[: self._filled] if self._buffer is not None else memoryview(b"")
        return self._requests.run("put", key, lambda: client.put(key, data, condition), sent_bytes=len(data))

    def _put_together(self) -> str:
        if self._filled:
            self._send()
        while self._sent:
            self._reap()
        upload, parts, client = self._upload, self._parts, self._client
        if upload is None:
            raise ValueError(f"{self._path}: no upload was begun")
        return self._requests.run(
            "complete_upload",
            self._key,
            lambda: client.complete_upload(upload, parts, self._condition),
        )

    def _is_there(self) -> bool:
        """Whether a request whose answer was lost had been carried out: names are used once, so the size
        tells, or that it is not what was to be replaced."""
        info = self._look()
        return info is not None and info.size_bytes == self._position and info != self._replaced

    def _look(self) -> ObjectInfo | None:
        client, key = self._client, self._key
        try:
            return self._requests.run("head", key, lambda: client.head(key))
        except ServiceError:
            return None

    def _throw_away(self) -> None:
        self._called_off.set()  # patience with a service that fails would keep the caller waiting
        for part, give_back in self._sent:
            if part.cancel():
                give_back()
        wait([part for part, _ in self._sent])
        self._sent.clear()
        self._release()
        with clearing_up():
            self._abort_upload()

    def _abort_upload(self) -> None:
        upload = self._upload
        if upload is not None:
            try:
                self._requests.run("abort_upload", self._key, lambda: self._client.abort_upload(upload))
            except (StorageError, ServiceError) as error:
                logger.warning("%s: an unfinished upload stays behind: %s", self._path, error)
        self._abort_strangers()

    def _release(self) -> None:
        if self._buffer is not None:
            self._pool.give(self._buffer)
            self._buffer = None


class StreamWriteHandle(_ObjectWriteHandle):
    """Through a file object of the file system, which is closed to make the object."""

    def __init__(self, name: str, path: str, key: str, requests: Requests, client: StreamClient) -> None:
        super().__init__(name, path, key, requests)
        self._client = client
        self._file: IO[bytes] = requests.run("open", key, lambda: client.open_write(key))

    def _append(self, view: memoryview) -> None:
        self._once("write", lambda: self._file.write(view))

    def _complete(self) -> None:
        self._once("close", self._file.close)

    def _throw_away(self) -> None:
        self._client.discard(self._file, self._key)

    def _once(self, op: str, act: Callable[[], object]) -> None:
        """One attempt: nobody knows how much of it was done."""
        try:
            with self._client.writing():
                act()
        except RequestError as error:
            raise StorageError(f"{op} of {self._path} failed: {error}", path=self._path, op=op) from error
