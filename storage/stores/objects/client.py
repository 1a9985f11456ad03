"""What is asked of an object service: plain requests, each one attempt, safe from any thread.

Two clients: `dcp.storage.stores.objects.s3` (s3fs) and `dcp.storage.stores.objects.generic` (any fsspec file
system). Repeating, counting and naming what failed is `dcp.storage.stores.objects.requests`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from dcp.storage.stores.base import Buffer

__all__ = ["ABSENT", "Absent", "Condition", "Failure", "ObjectClient", "ObjectInfo", "RequestError", "Upload"]


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
    """One attempt failed; the service's or the library's error is chained."""

    def __init__(self, kind: Failure, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds


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


@dataclass(slots=True)
class Upload:
    """An upload in parts that has begun; parts may arrive in any order."""

    key: str
    upload_id: str


class ObjectClient(ABC):
    """Requests to one bucket (or file system). Keys are relative to it; every failure is a `RequestError`."""

    has_parts: bool
    """Whether uploads go in parts that are sent at once; otherwise by `put` and `stream` only."""

    concurrency: int
    """Requests that are worth sending at a time."""

    replaces_conditionally: bool
    """Whether `put` can compare with an entity tag."""

    def __init__(self, place: str) -> None:
        self.place = place
        """The bucket, for messages and for what is detected once per place."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """What the object is; `Failure.MISSING` if it is absent."""

    @abstractmethod
    def get(
        self, key: str, begin: int, buffers: Sequence[memoryview], *, etag: str | None = None
    ) -> ObjectInfo:
        """Fill ``buffers`` (one-dimensional, of bytes) in order from byte ``begin`` on, all of them or fail.

        `Failure.RANGE` if the object ends before; `Failure.CONDITION` if its tag is not ``etag``; a body that
        ends too early is `Failure.PASSING`. Nothing is written to the buffers after the return.
        """

    @abstractmethod
    def read(self, key: str, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """The first ``limit_bytes`` (at least 1) of the object, or all of it; the info has its true size."""

    @abstractmethod
    def put(self, key: str, data: Buffer, condition: Condition = None) -> str:
        """Store a whole object under ``condition`` (else `Failure.CONDITION`); returns its entity tag."""

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
        """Throw the parts away; one that is not there any more is fine."""

    @abstractmethod
    def uploads(self, prefix: str) -> list[Upload]:
        """Uploads in parts that were begun below ``prefix`` and not ended."""

    @abstractmethod
    def list(self, prefix: str, *, shallow: bool) -> Iterator[list[ObjectInfo] | list[str]]:
        """Pages of the objects whose keys begin with ``prefix``, in order.

        ``shallow``: only those without a further ``/``; what lies deeper is given as pages of the common
        prefixes (str, with their ``/``).
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """Delete up to `delete_limit` objects at once; missing ones are fine. Returns what failed, by key."""

    delete_limit: int = 1

    def make_folder(self, key: str) -> None:
        """Make a folder, where the service has any."""

    def remove_folder(self, key: str) -> None:
        """Remove an empty folder, where the service has any."""

    def folder_exists(self, key: str) -> bool:
        """Whether there is a folder; services without any say yes."""
        return True
