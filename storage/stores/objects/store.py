"""The store on an object service: `FsspecStore`.

A folder is a prefix of keys, a file an object, and a file appears when its last request has been answered.
Nothing is ever renamed or copied. What makes a commit atomic is the conditional request that publishes the
manifest; see `dcp.storage.commit` for why no lock is needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from dcp.storage.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    StorageError,
)
from dcp.storage.stores.base import ANY, Capabilities, Expected, FileInfo, ReadProfile, Store, Version
from dcp.storage.stores.handles import ReadHandle, WriteHandle
from dcp.storage.stores.names import check_name
from dcp.storage.stores.objects import listing
from dcp.storage.stores.objects.client import (
    ABSENT,
    Condition,
    Failure,
    ListingPage,
    ObjectClient,
    ObjectInfo,
    PartsClient,
    RequestError,
    StreamClient,
)
from dcp.storage.stores.objects.conditions import require_conditional_writes
from dcp.storage.stores.objects.options import ObjectOptions
from dcp.storage.stores.objects.places import bucket_and_prefix, client_for
from dcp.storage.stores.objects.reading import REQUEST_BYTES, ObjectReadHandle
from dcp.storage.stores.objects.requests import Requests, ServiceError
from dcp.storage.stores.objects.shared import Shared, locked, shared
from dcp.storage.stores.objects.writing import PartsWriteHandle, StreamWriteHandle

__all__ = ["FsspecStore"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WHOLE_PUT_BYTES: Final = 64 << 20
"""A publish above this goes in parts, as data files do."""

_GAP_BYTES: Final = 256 << 10
_JOINED_BYTES: Final = 8 << 20
"""What has to be put together goes through memory of our own, of which each thread has as much."""

_STREAMED_BYTES: Final = 64 << 20
"""Asked for at once where bodies go to their places as they come, so that no memory depends on it: each
request costs time at both ends, and there are as many as threads for a gigabyte still."""


class FsspecStore(Store):
    """Files below an URL of S3, or of whatever else fsspec has a file system for.

    ``storage_options`` are the file system's own, and `ObjectOptions`. No request is made before the first
    operation. Stores of one place share their connections; a pickled or forked one makes its own.

    On S3, `publish` is atomic between processes by conditional requests. Other file systems can create
    exclusively (atomically where they implement it), but not compare and replace; there, replacing is refused
    unless ``conditional_writes="off"`` accepts that one writer may overwrite what another has just written.
    `lock` is between the threads of one process, everywhere.
    """

    capabilities = Capabilities(lists_folders=True, lists_tree=True)

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        s3 = bucket_and_prefix(url)
        self.url = url.rstrip("/")
        self._given = dict(storage_options or {})
        self._options, self._filesystem_options = ObjectOptions.split(self._given)
        self._bucket = s3[0] if s3 else None
        self._prefix = s3[1] if s3 else None
        self._requests = Requests(self.url, self._bucket or url.partition("://")[0], self._options)
        self._found: tuple[int, Shared | None] = 0, None
        self.read_profile = ReadProfile(
            threads=self._options.concurrency,
            request_bytes=REQUEST_BYTES if self._bucket is None else _STREAMED_BYTES,
            join_below_bytes=_JOINED_BYTES,
            gap_bytes=_GAP_BYTES,
            scatter=True,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return FsspecStore, (self.url, self._given)

    def traffic(self) -> dict[str, float]:
        """The traffic of this store object; "requests" has each attempt, "retries" those that were not the
        first."""
        return self._requests.traffic()

    # -- folders ---------------------------------------------------------------------------------------------

    def make_root(self) -> None:
        """Nothing on S3, where a prefix needs no making."""
        self._client.make_folder(self._root_key())

    def remove_root(self) -> None:
        """Nothing on S3: a prefix is gone with its last object."""
        self._client.remove_folder(self._root_key())

    def sync(self) -> None:
        """Nothing to do: an object is durable when the service has answered."""

    def list(self) -> list[FileInfo]:
        """One request for each thousand files, on S3."""
        return listing.files_of(self._pages(shallow=True), self._key(""))

    def walk(self) -> Iterator[tuple[str, FileInfo]]:
        """The files of all folders directly below this one: (folder, file), by one listing of everything."""
        return listing.deep_files(self._pages(shallow=False), self._key(""))

    def tree(self) -> Iterator[tuple[str, FileInfo]]:
        """All files below, however deep: (folder relative to this one, "" is itself; file), a folder's files
        in order. One listing of everything on S3, else one for each folder."""
        client, prefix = self._client, self._key("")
        if isinstance(client, PartsClient):
            return listing.key_tree(self._pages(shallow=False), prefix)
        return listing.folder_tree(lambda below: self._page(client, below, shallow=True, after=None), prefix)

    def folders(self) -> Sequence[str]:
        """Names of the folders directly below this one, sorted."""
        return listing.folders_of(self._pages(shallow=True), self._key(""))

    def exists(self) -> bool:
        """Whether the folder itself is there; where prefixes are all there is, it always is."""
        key = self._root_key()
        return self._run("head", key, lambda: self._client.folder_exists(key))

    # -- small files -----------------------------------------------------------------------------------------

    def stat(self, name: str) -> FileInfo | None:
        """One request."""
        key = self._file_key(name)
        info = self._unless_missing("head", key, lambda: self._client.head(key))
        return None if info is None else listing.file_info(name, info)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """One request up to `REQUEST_BYTES`; what is more comes by further ones, at once."""
        path = self.path_of(name)
        data, info = self._start(name, max(1, min(limit_bytes, REQUEST_BYTES)))
        if info.size_bytes > limit_bytes:
            raise CheckpointFormatError(
                f"{path} has {info.size_bytes} bytes, more than the {limit_bytes} that such a file may have: "
                "it is damaged or hostile",
                path=path,
                size_bytes=info.size_bytes,
                limit_bytes=limit_bytes,
            )
        if len(data) >= info.size_bytes:
            return data
        whole = bytearray(info.size_bytes)
        whole[: len(data)] = data
        handle = self._handle(name, info)
        handle.preadv([memoryview(whole)[len(data) :]], len(data))
        return bytes(whole)

    def read_start(self, name: str, size_bytes: int) -> tuple[bytes, int]:
        """One request, of at most `REQUEST_BYTES`."""
        data, info = self._start(name, min(size_bytes, REQUEST_BYTES))
        return data, info.size_bytes

    def _start(self, name: str, size_bytes: int) -> tuple[bytes, ObjectInfo]:
        key, path = self._file_key(name), self.path_of(name)
        found = self._unless_missing("get", key, lambda: self._client.read(key, size_bytes))
        if found is None:
            raise CheckpointNotFoundError(f"{path} does not exist", path=path)
        return found

    def version(self, name: str) -> Version | None:
        """The entity tag, where the service has any: one request. Else a digest of the content."""
        key = self._file_key(name)
        tag = self._unless_missing("head", key, lambda: self._client.tag(key))
        return None if tag is None else _version(tag)

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Expected = ANY) -> Version:
        """A conditional request: the service compares, not this process. See `ConditionalWrites`."""
        self._file_key(name)
        condition: Condition = None if expected is ANY else ABSENT
        if isinstance(expected, Version):
            condition = _tag(expected)
            if not condition:  # no version of this store: it cannot be what is there
                raise self.conflict(name)
        if condition is not None and not self._compares(condition):
            if self.version(name) != (expected if isinstance(expected, Version) else None):
                raise self.conflict(name)
            condition = None
        try:
            return _version(self._put(name, data, condition))
        except ServiceError as error:
            # An answer was lost, and the request was made again: what is there may be what we wrote. Its size
            # tells nothing: manifests of two saves of one model are of one size.
            version = self.version(name) if error.is_ambiguous else None
            if version is not None and self._holds(name, data):
                return version
            if error.kind is Failure.CONDITION:
                raise self.conflict(name) from error
            raise StorageError(
                f"{self.path_of(name)}: {error}", path=self.path_of(name), op="publish"
            ) from error

    def delete(self, name: str) -> None:
        """One request."""
        key = self._file_key(name)
        self._unless_missing("delete", key, lambda: self._client.delete([key]))

    def delete_if(self, name: str, expected: Version) -> bool:
        """Compared here, because not all services do, and by those that do once more."""
        key, there = self._file_key(name), self.version(name)
        if there != expected:
            return there is None
        try:
            self._requests.run("delete", key, lambda: self._client.delete_if(key, _tag(expected)))
        except ServiceError:  # replaced or deleted in between; or it was us, and the answer was lost
            return self.version(name) is None
        return True

    def delete_all(self, names: Sequence[str]) -> dict[str, Exception]:
        """One request for each thousand files, on S3."""
        failed: dict[str, Exception] = {}
        by_key = {self._file_key(name): name for name in names}
        keys, step = list(by_key), self._client.delete_limit
        for start in range(0, len(keys), step):
            part = keys[start : start + step]
            try:
                refused = self._run("delete", part[0], partial(self._client.delete, part))
            except StorageError as error:
                failed |= {by_key[key]: error for key in part}
                continue
            for key, reason in refused.items():
                path = self.path_of(by_key[key])
                failed[by_key[key]] = StorageError(
                    f"delete of {path} failed: {reason}", path=path, op="delete", key=key
                )
        return failed

    def abort_uploads(self, belongs: Callable[[str], bool]) -> int:
        """Two requests or more, on S3. Without the permission to list uploads it does nothing."""
        client = self._client
        if not isinstance(client, PartsClient):
            return 0
        try:
            found = self._run("list_uploads", self._key(""), lambda: client.uploads(self._key("")))
        except StorageError as error:
            logger.debug("%s: unfinished uploads cannot be listed: %s", self.url, error)
            return 0
        prefix = self._key("")
        ours = [upload for upload in found if (name := listing.name_of(upload.key, prefix)) and belongs(name)]
        for upload in ours:
            try:
                self._run("abort_upload", upload.key, partial(client.abort_upload, upload))
            except StorageError as error:
                logger.debug("%s: an unfinished upload stays behind: %s", self.url, error)
        return len(ours)

    # -- data files ------------------------------------------------------------------------------------------

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """On S3 no request, given the size."""
        if expected_bytes is not None and self._client.tells_size:
            return self._handle(name, ObjectInfo(self._file_key(name), expected_bytes, 0.0, ""))
        key = self._file_key(name)
        info = self._unless_missing("head", key, lambda: self._client.head(key))
        if info is None:
            raise CheckpointNotFoundError(f"{self.path_of(name)} does not exist", path=self.path_of(name))
        return self._handle(name, info)

    def presigned_url(self, name: str, seconds: int) -> str | None:
        """A URL that anybody may read the file by for ``seconds``; None where there is no such thing."""
        key, client = self._file_key(name), self._client
        sign = getattr(client, "presigned_url", None)
        if sign is None:
            return None
        return str(self._run("presign", key, lambda: sign(key, seconds)))

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> WriteHandle:
        """On S3 without a request; that the name is taken shows when the file is finished."""
        key, path, client = self._file_key(name), self.path_of(name), self._client
        if isinstance(client, PartsClient):
            # Not tried out: save ids make names unique, and a thousand ranks would all have to.
            condition = None if replace or self._options.conditional_writes == "off" else ABSENT
            return self._parts(name, client, condition, expected_bytes, replace=replace)
        if replace:
            self.delete(name)  # such services take the name at once
        elif self.stat(name) is not None:
            raise StorageError(
                f"{path} exists already: data files are never overwritten", path=path, op="create"
            )
        if not isinstance(client, StreamClient):
            raise StorageError(f"{self.url} cannot be written to", path=path, op="create")
        return StreamWriteHandle(name, path, key, self._requests, client)

    @contextmanager
    def lock(self, *, timeout_seconds: float) -> Iterator[None]:
        """Between the threads of this process only: `publish` compares for all others."""
        with locked(self.url, timeout_seconds):
            yield

    # -- within ----------------------------------------------------------------------------------------------

    def _shared(self) -> Shared:
        pid, found = self._found
        if found is None or pid != os.getpid():
            found = shared(self._place(), self._options, self._filesystem_options, self._make_client)
            self._found = os.getpid(), found
        return found

    def _place(self) -> str:
        if self._bucket is not None:
            return self._bucket
        from dcp.storage.stores.objects.generic.service import place_of

        return place_of(self.url)

    def _make_client(self) -> ObjectClient:
        return client_for(self.url, self._bucket, self._filesystem_options, self._options)

    @property
    def _client(self) -> ObjectClient:
        return self._shared().client

    def _root_key(self) -> str:
        return self._key("").rstrip("/")

    def _key(self, name: str) -> str:
        if self._prefix is None:
            from dcp.storage.stores.objects.generic.service import path_of

            self._prefix = f"{path_of(self.url)}/"
        return f"{self._prefix}{name}"

    def _file_key(self, name: str) -> str:
        return self._key(check_name(name))

    def _pages(self, *, shallow: bool) -> Iterator[ListingPage]:
        prefix, client = self._key(""), self._client
        after: str | None = None
        while True:
            page = self._page(client, prefix, shallow=shallow, after=after)
            yield page
            if page.next is None:
                return
            after = page.next

    def _page(self, client: ObjectClient, prefix: str, *, shallow: bool, after: str | None) -> ListingPage:
        return self._run("list", prefix, partial(client.list_page, prefix, shallow=shallow, after=after))

    def _handle(self, name: str, info: ObjectInfo) -> ObjectReadHandle:
        return ObjectReadHandle(
            name,
            self.path_of(name),
            info.key,
            info.size_bytes,
            info.etag or None,
            self._shared,
            self._requests,
        )

    def _parts(
        self,
        name: str,
        client: PartsClient,
        condition: Condition,
        expected_bytes: int | None,
        *,
        replace: bool = False,
    ) -> PartsWriteHandle:
        return PartsWriteHandle(
            name,
            self.path_of(name),
            self._file_key(name),
            self._requests,
            self._shared(),
            client,
            condition=condition,
            expected_bytes=expected_bytes,
            replace=replace,
        )

    def _put(self, name: str, data: bytes, condition: Condition) -> str:
        key, client = self._file_key(name), self._client
        if isinstance(client, PartsClient) and len(data) > _WHOLE_PUT_BYTES:
            handle = self._parts(name, client, condition, len(data))
            try:
                handle.write(data)
                return handle.finish_as()
            except BaseException:
                handle.abort()
                raise
        return self._requests.run("put", key, lambda: client.put(key, data, condition), sent_bytes=len(data))

    def _holds(self, name: str, data: bytes) -> bool:
        """Whether ``data`` is what the file has now; another writer's may be longer, or be gone already."""
        try:
            return self.read(name, limit_bytes=len(data)) == data
        except (CheckpointFormatError, CheckpointNotFoundError):
            return False

    def _compares(self, condition: Condition) -> bool:
        """Whether the service is to compare; False where the user has agreed that it does not.

        Raises `StorageError` where it cannot, and nobody has agreed.
        """
        if self._options.conditional_writes == "off":
            return False
        if self._options.conditional_writes == "auto":
            try:
                require_conditional_writes(self._client, self._requests, condition, self._key(""), self.url)
            except RequestError as error:  # of the client itself, which cannot say what service it talks to
                raise StorageError(f"{self.url}: {error}", path=self.url, op="publish") from error
        return True

    def _run(self, op: str, key: str, attempt: Callable[[], T]) -> T:
        """A request of which no answer is expected that needs interpreting."""
        try:
            return self._requests.run(op, key, attempt)
        except ServiceError as error:
            raise StorageError(f"{op} of {key!r}: {error}", path=self.url, op=op, key=key) from error

    def _unless_missing(self, op: str, key: str, attempt: Callable[[], T]) -> T | None:
        try:
            return self._requests.run(op, key, attempt)
        except ServiceError as error:
            if error.kind is Failure.MISSING:
                return None
            raise StorageError(f"{op} of {key!r}: {error}", path=self.url, op=op, key=key) from error


def _version(tag: str) -> Version:
    return Version(f"etag:{tag}")


def _tag(version: Version) -> str:
    return version.token.removeprefix("etag:") if version.token.startswith("etag:") else ""
