"""What is asked of an object service: plain requests, each one attempt, safe from any thread.

Two clients: that of `dcp.storage.stores.objects.s3` (s3fs), and of `dcp.storage.stores.objects.generic` (any
fsspec file system). Repeating, counting and naming what failed is `dcp.storage.stores.objects.requests`.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import IO, Final, TypeAlias

from dcp.storage.stores.handles import Buffer, Inflow

__all__ = [
    "ABSENT",
    "CALLED_OFF",
    "Absent",
    "Condition",
    "Failure",
    "ListingPage",
    "ObjectClient",
    "ObjectInfo",
    "PartsClient",
    "RequestError",
    "StreamClient",
    "Upload",
    "is_unresolved",
]

_LONGEST_CHAIN: Final = 8


class Failure(Enum):
    """Why a request failed, as far as it decides what to do next."""

    MISSING = "missing"
    """There is no such object (or upload)."""
    CONDITION = "condition"
    """Something else is there than the request's condition says."""
    RANGE = "range"
    """The object ends before the range begins."""
    PASSING = "passing"
    """Throttled, timed out, reset, cut short, or an error of the server: the next attempt may succeed."""
    FULL = "full"
    """No space or quota left."""
    FINAL = "final"
    """Denied, no such bucket, not understood: the next attempt would fail alike."""


class RequestError(Exception):
    """One attempt failed; the service's or the library's error is chained.

    ``is_unresolved``: the name of the service's host has no address.
    """

    def __init__(
        self,
        kind: Failure,
        message: str,
        *,
        retry_after_seconds: float = 0.0,
        is_unresolved: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds
        self.is_unresolved = is_unresolved


def is_unresolved(error: BaseException | None) -> bool:
    """Whether an error, or one that it was made of, says that a host's name has no address."""
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return False
        if isinstance(error, socket.gaierror) or "DNSError" in type(error).__name__:
            return True
        within = getattr(error, "kwargs", None)  # of botocore
        inner = within.get("error") if isinstance(within, dict) else None
        error = next(
            (one for one in (inner, getattr(error, "os_error", None)) if isinstance(one, BaseException)),
            error.__cause__ or error.__context__,
        )
    return False


CALLED_OFF: ContextVar[threading.Event | None] = ContextVar("CALLED_OFF", default=None)
"""Once it is set nobody wants the answer any more. A client that can ends the attempt then, as one that
failed in passing."""


class Absent(Enum):
    """The type of `ABSENT`."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT
"""The condition that no object has the key yet."""

Condition: TypeAlias = "str | Absent | None"
"""What must be there for a write to happen: an object with this entity tag, none, or whatever is."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object; ``etag`` changes whenever the content does, and is empty in listings of some services."""

    key: str
    size_bytes: int
    modified_seconds: float
    etag: str


@dataclass(frozen=True, slots=True)
class ListingPage:
    """A part of a listing: objects, common prefixes (with their ``/``), and where the next part begins."""

    objects: list[ObjectInfo]
    prefixes: list[str]
    next: str | None


@dataclass(slots=True)
class Upload:
    """An upload in parts that has begun; parts may arrive in any order."""

    key: str
    upload_id: str


class ObjectClient(ABC):
    """Requests to one bucket, or one file system. Every failure is a `RequestError`."""

    concurrency: int
    """Requests that are worth sending at a time."""

    tells_size: bool = False
    """Whether every `get` tells size and tag, so that an object need not be looked at before."""

    delete_limit: int = 1
    """How many objects `delete` takes at once."""

    def __init__(self, place: str) -> None:
        self.place = place
        """The bucket, for messages."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Service and bucket: what is found out about it once holds for all clients of the same identity."""

    @property
    @abstractmethod
    def creates_conditionally(self) -> bool | None:
        """Whether `put` with `ABSENT` is atomic; None if that has to be tried."""

    @property
    @abstractmethod
    def replaces_conditionally(self) -> bool | None:
        """Whether `put` compares entity tags atomically; None if that has to be tried."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """What the object is; `Failure.MISSING` if it is absent."""

    def tag(self, key: str) -> str:
        """The object's entity tag; `Failure.MISSING` if it is absent."""
        return self.head(key).etag

    @abstractmethod
    def get(self, key: str, begin: int, inflow: Inflow, *, etag: str | None = None) -> ObjectInfo:
        """Fill the buffers of ``inflow`` (one-dimensional, of bytes) from byte ``begin`` on, all of them or
        fail.

        `Failure.RANGE` if the object ends before; `Failure.CONDITION` if its tag is not ``etag``; a body that
        ends too early is `Failure.PASSING`. Nothing is written to the buffers after the return. The size in
        the result is -1, and the tag empty, where the answer does not tell.
        """

    @abstractmethod
    def read(self, key: str, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """The first ``limit_bytes`` (at least 1) of the object, or all of it; the info has its true size."""

    @abstractmethod
    def put(self, key: str, data: Buffer, condition: Condition = None) -> str:
        """Store a whole object under ``condition`` (else `Failure.CONDITION`); returns its entity tag."""

    @abstractmethod
    def list_page(self, prefix: str, *, shallow: bool, after: str | None) -> ListingPage:
        """One page of the objects whose keys begin with ``prefix``, in order.

        ``shallow``: only objects without a further ``/``, and of those with one the prefixes up to it.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """Delete up to `delete_limit` objects at once; missing ones are fine. Returns what failed, by key."""

    def delete_if(self, key: str, etag: str) -> None:
        """Delete an object whose tag is ``etag`` (else `Failure.CONDITION`, where the service compares)."""
        self.delete([key])

    def make_folder(self, key: str) -> None:
        """Make a folder, where the service has any."""
        return

    def remove_folder(self, key: str) -> None:
        """Remove an empty folder, where the service has any."""
        return

    def folder_exists(self, key: str) -> bool:
        """Whether there is a folder; services without any say yes."""
        return True


class PartsClient(ObjectClient):
    """A service that takes files in parts, several at a time and in any order."""

    @abstractmethod
    def begin_upload(self, key: str) -> Upload:
        """Begin an upload in parts."""

    @abstractmethod
    def put_part(self, upload: Upload, number: int, data: memoryview, crc: int) -> object:
        """Send part ``number`` (from 1), whose CRC-32 is ``crc``; returns what `complete_upload` wants."""

    @abstractmethod
    def complete_upload(self, upload: Upload, parts: Sequence[object], condition: Condition) -> str:
        """Make the object of its parts under ``condition``; returns its entity tag."""

    @abstractmethod
    def abort_upload(self, upload: Upload) -> None:
        """Throw the parts away; an upload that is not there any more is fine."""

    @abstractmethod
    def uploads(self, prefix: str) -> list[Upload]:
        """Uploads that were begun below ``prefix`` and have not ended."""


class StreamClient(ObjectClient):
    """A service that takes files front to back, as file objects."""

    @abstractmethod
    def open_write(self, key: str) -> IO[bytes]:
        """A file to be written; closing it makes the object."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[None]:
        """Around what is done with such a file: its errors become `RequestError`."""

    @abstractmethod
    def discard(self, file: IO[bytes], key: str) -> None:
        """Throw such a file away, with what has been written of it."""
