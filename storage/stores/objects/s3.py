"""S3 stores: a prefix of a bucket, and multipart uploads that send parts while the next parts fill."""

from __future__ import annotations

import base64
import http.client
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from isal.isal_zlib import crc32

from dcp.storage.errors import CheckpointConflictError, StorageError
from dcp.storage.stores.base import Inflow, Version, WriteHandle, copy_bytes, is_name
from dcp.storage.stores.objects.requests import Failure, RequestError
from dcp.storage.stores.objects.store import ABSENT, ObjectInfo, ObjectStore, Page, Part
from dcp.storage.threads import clearing_up, result_of

if TYPE_CHECKING:
    from dcp.storage.stores.objects.bucket import S3Bucket


logger = logging.getLogger(__name__)

_URL: Final = re.compile(r"s3a?://([^/]+)/?(.*)", re.DOTALL)
_RANGE: Final = re.compile(r"(\d+)-\d+/(\d+)")
_WHOLE_PUT_BYTES: Final = 64 << 20
"""Maximum size of a publish in a single request."""
_DELETED_AT_ONCE: Final = 1000
_MAX_PARTS: Final = 10_000
_PLANNED_PARTS: Final = 4_000
_LARGEST_PART_BYTES: Final = 1 << 30
_GROW_AFTER_PARTS: Final = 5_000


class S3Store(ObjectStore):
    """Prefix of an S3 bucket. ``storage_options`` are those of `s3fs.S3FileSystem` plus `ObjectOptions`."""

    streams_bodies = True

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        found = _URL.fullmatch(url.rstrip("/"))
        if found is None:
            raise StorageError(f"{url!r} has no bucket: use s3://bucket/prefix", path=url, op="open")
        super().__init__(url, found[1], storage_options)
        self.prefix = f"{found[2]}/" if found[2] else ""

    @property
    def bucket(self) -> S3Bucket:
        """Client of the bucket."""
        bucket: S3Bucket = self.shared().client
        return bucket

    def _make_client(self) -> tuple[S3Bucket, int]:
        try:
            from dcp.storage.stores.objects.bucket import S3Bucket
        except ImportError as error:
            raise StorageError(
                f"s3://{self.place} needs s3fs: pip install 'dcphub[s3]'",
                path=f"s3://{self.place}",
                op="open",
            ) from error
        return S3Bucket(self.place, self._filesystem_options, self.options), self.options.concurrency

    def _has_condition(self, *, creates: bool) -> bool | None:
        """Return True for Amazon's endpoints, None (probe) for other services."""
        host = urlsplit(self.bucket.endpoint()).hostname or ""
        return True if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) else None

    def _head(self, key: str) -> ObjectInfo:
        answer = self.bucket.ask("head_object", Key=key)
        return _info(key, answer, answer["ContentLength"])

    def _start(self, key: str, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        def act() -> tuple[bytes, ObjectInfo]:
            answer = self._ranged(key, 0, limit_bytes)
            with answer["Body"]:
                info = _range_info(key, answer, 0, limit_bytes)
                return answer["Body"].read(limit_bytes + 1), info

        try:
            data, info = self.bucket.attempt(act, limit_bytes)
        except RequestError as error:
            if error.kind is not Failure.RANGE:
                raise
            data, info = b"", self._head(key)  # an empty object has no first byte
        if len(data) != min(info.size_bytes, limit_bytes):  # or the object was replaced meanwhile
            raise RequestError(Failure.PASSING, f"received {len(data)} of {info.size_bytes} bytes")
        return data, info

    def _get(self, key: str, begin: int, inflow: Inflow, etag: str | None) -> ObjectInfo:
        size = inflow.size_bytes

        def act() -> ObjectInfo:
            answer = self._ranged(key, begin, size, **({"IfMatch": etag} if etag else {}))
            with answer["Body"]:
                info = _range_info(key, answer, begin, size)
                if info.size_bytes < begin + size:
                    raise RequestError(Failure.RANGE, f"the object has {info.size_bytes} bytes")
                if (came := answer.get("ContentLength", size)) != size:
                    raise RequestError(Failure.PASSING, f"the response has {came} bytes, expected {size}")
                self.bucket.fill(answer, inflow)
            return info

        return self.bucket.attempt(act, body_bytes=size)

    def _ranged(self, key: str, begin: int, size: int, **conditions: str) -> dict[str, Any]:
        wanted = {"Key": key, "Range": f"bytes={begin}-{begin + size - 1}", **conditions}
        return self.bucket.call("get_object", wanted)

    def _put(self, key: str, data: bytes, condition: str | None) -> str:
        # The service verifies the CRC-32.
        arguments = {"Key": key, "Body": data, "ChecksumCRC32": _checksum(crc32(data))}
        return str(self.bucket.ask("put_object", len(data), **arguments, **_conditions(condition))["ETag"])

    def put(self, key: str, data: bytes, condition: str | None) -> str:
        """Put an object; large objects in parts."""
        if len(data) <= _WHOLE_PUT_BYTES:
            return super().put(key, data, condition)
        handle = PartsWriteHandle(self, key.removeprefix(self.prefix), condition, len(data))
        try:
            handle.write(data)
            return handle.complete()
        except BaseException:
            handle.abort()
            raise

    def _pages(self, prefix: str, *, shallow: bool) -> Iterator[Page]:
        arguments = {"Prefix": prefix} | ({"Delimiter": "/"} if shallow else {})
        for page in self._paged(
            "list", "list_objects_v2", arguments, {"ContinuationToken": "NextContinuationToken"}
        ):
            objects = [  # times in whole seconds, like the headers of single objects
                ObjectInfo(
                    one["Key"],
                    int(one["Size"]),
                    float(int(one["LastModified"].timestamp())),
                    str(one.get("ETag", "")),
                )
                for one in page.get("Contents") or ()
            ]
            yield objects, [str(one["Prefix"]) for one in page.get("CommonPrefixes") or ()]

    def _paged(
        self, op: str, method: str, arguments: dict[str, Any], following: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the answers of a paged request; ``following`` maps continuation fields to arguments."""
        while True:
            page = self.requests.run(op, self.prefix, partial(self.bucket.ask, method, **arguments))
            yield page
            if not page.get("IsTruncated"):
                return
            arguments = arguments | {name: page.get(source, "") for name, source in following.items()}

    def _delete(self, key: str) -> None:
        self.bucket.ask("delete_object", Key=key)

    def delete_all(self, names: Sequence[str]) -> dict[str, Exception]:
        """Delete up to a thousand files per request."""
        if len(names) == 1:
            return super().delete_all(names)
        failed: dict[str, Exception] = {}
        for start in range(0, len(names), _DELETED_AT_ONCE):
            part = names[start : start + _DELETED_AT_ONCE]
            by_key = {self.key_of(name): name for name in part}
            wanted = {"Objects": [{"Key": key} for key in by_key], "Quiet": True}
            delete = partial(self.bucket.ask, "delete_objects", Delete=wanted)
            try:
                answer = self.requests.run("delete", self.key_of(part[0]), delete)
            except StorageError as error:
                failed |= dict.fromkeys(part, error)
                continue
            for one in answer.get("Errors") or ():
                if one.get("Code") != "NoSuchKey":
                    name = by_key[str(one.get("Key"))]
                    failed[name] = StorageError(
                        f"delete of {self.path_of(name)} failed: {one.get('Code')}: {one.get('Message')}",
                        path=self.path_of(name),
                        op="delete",
                        key=self.key_of(name),
                    )
        return failed

    def delete_if(self, name: str, expected: Version) -> bool:
        """Compare, then delete with a condition, because some services ignore conditions."""
        key, there = self.key_of(name), self.version(name)
        if there != expected:
            return there is None
        bucket, tag = self.bucket, expected.token.removeprefix("etag:")

        def attempt() -> None:
            try:
                bucket.ask("delete_object", Key=key, IfMatch=tag)
            except RequestError as error:
                if error.kind is not Failure.FINAL or "NotImplemented" not in str(error):
                    raise
                bucket.ask("delete_object", Key=key)

        try:
            self.requests.run("delete", key, attempt, answers={Failure.MISSING, Failure.CONDITION})
        except RequestError:  # replaced or deleted meanwhile, or deleted by us with a lost answer
            return self.version(name) is None
        return True

    def abort_upload(self, key: str, upload_id: str, level: int) -> None:
        """Abort an upload; a missing upload is no error."""
        abort = partial(self.bucket.ask, "abort_multipart_upload", Key=key, UploadId=upload_id)
        try:
            self._unless_missing("abort_upload", key, abort)
        except StorageError as error:
            logger.log(level, "%s: an unfinished upload could not be aborted: %s", self.url, error)

    def abort_uploads(
        self, belongs: Callable[[str], bool], level: int = logging.DEBUG, begin: str = ""
    ) -> int:
        """List and abort uploads. No effect without the permission to list uploads."""
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        where, start = {"Prefix": f"{self.prefix}{begin}"}, len(self.prefix)
        try:
            pages = list(self._paged("list_uploads", "list_multipart_uploads", where, following))
        except StorageError as error:
            logger.log(level, "%s: unfinished uploads cannot be listed: %s", self.url, error)
            return 0
        ended = 0
        for one in (one for page in pages for one in page.get("Uploads") or ()):
            key = str(one["Key"])
            if is_name(key[start:]) and belongs(key[start:]):
                self.abort_upload(key, str(one["UploadId"]), level)
                ended += 1
        return ended

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> WriteHandle:
        """Create a file without a request; an existing name is detected in `finish`."""
        # No probe of conditional requests: save ids make names unique, and every rank would have to probe.
        condition = None if replace or self.options.conditional_writes == "off" else ABSENT
        return PartsWriteHandle(self, name, condition, expected_bytes, replace=replace)

    def presigned_url(self, name: str, seconds: int) -> str:
        """Return a presigned URL to GET the file for ``seconds``, computed locally."""
        key = self.key_of(name)
        return self.requests.run("presign", key, partial(self.bucket.presigned_url, key, seconds))


class PartsWriteHandle(WriteHandle):
    """Multipart upload: parts are assembled in shared memory and sent by threads of the place.

    A file of one part takes a single request at the end. The object appears at the end, if ``condition``
    holds: otherwise `finish` raises `StorageError` and `complete` raises `RequestError`. With ``replace``,
    an existing object is replaced.
    """

    def __init__(
        self,
        store: S3Store,
        name: str,
        condition: str | None,
        expected_bytes: int | None,
        *,
        replace: bool = False,
    ) -> None:
        super().__init__(name, store.path_of(name))
        self._store = store
        self._key = store.key_of(name)
        self._condition = condition
        self._replace = replace
        self._shared = store.shared()
        self._part_bytes = store.options.part_bytes
        while (
            expected_bytes
            and self._part_bytes * _PLANNED_PARTS < expected_bytes
            and self._part_bytes < _LARGEST_PART_BYTES
        ):
            self._part_bytes *= 2  # S3 allows 10,000 parts
        self._part: Part | None = None
        self._filled = 0
        self._upload_id: str | None = None
        self._sent: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []
        self._count = 0
        self._begun = 0
        self._called_off = threading.Event()

    def _append(self, view: memoryview) -> None:
        while len(view):
            # Later parts wait for a part of the same file, never of another file.
            while self._part is None:
                self._part = self._shared.part(self._part_bytes, is_first=not self._sent)
                if self._part is None:
                    self._reap()
            room = memoryview(self._part.data)[self._filled : self._filled + len(view)]
            copy_bytes(room, view[: len(room)])
            self._filled += len(room)
            view = view[len(room) :]
            if self._filled == self._part_bytes:
                self._send()

    def _reap(self) -> None:
        """Wait for the oldest pending part and raise its error.

        The part stays pending until done, so that `abort` covers an interrupted wait.
        """
        self._parts.append(result_of(self._sent[0]))
        self._sent.popleft()

    def _send(self) -> None:
        """Hand the part to a thread."""
        while self._sent and self._sent[0].done():
            self._reap()
        if self._upload_id is None:
            self._upload_id = self._begin()
        part, size = self._part, self._filled
        self._part, self._filled = None, 0
        if part is None:
            return
        self._count += 1
        if self._count > _MAX_PARTS:
            raise StorageError(
                f"{self._path} needs more than {_MAX_PARTS} parts: pass the storage option part_bytes with a "
                "larger value, or expected_bytes to create()",
                path=self._path,
                op="put_part",
            )
        put = partial(self._put, self._upload_id, self._count, part, size)
        self._sent.append(self._shared.threads.submit(copy_context().run, put))
        if self._count % _GROW_AFTER_PARTS == 0 and self._part_bytes < _LARGEST_PART_BYTES:
            self._part_bytes *= 4

    def _begin(self) -> str:
        def attempt() -> str:
            self._begun += 1
            where = {"Key": self._key, "ChecksumAlgorithm": "CRC32"}
            return str(self._store.bucket.ask("create_multipart_upload", **where)["UploadId"])

        return self._store.requests.run("begin_upload", self._key, attempt)

    def _put(self, upload_id: str, number: int, memory: Part, size: int) -> dict[str, Any]:
        """Send a part with a CRC-32, and return the entry for completion."""
        data = memory.data if size == len(memory.data) else memory.data[:size]
        part = {"PartNumber": number, "ChecksumCRC32": _checksum(crc32(data))}
        where = {"Key": self._key, "UploadId": upload_id, "Body": data}
        try:
            answer = self._store.requests.run(
                "put_part",
                self._key,
                partial(self._store.bucket.ask, "upload_part", size, **where, **part),
                answers={Failure.MISSING},
                sent_bytes=size,
                called_off=self._called_off,
            )
        except RequestError as error:
            raise self._ended() from error
        if "ChecksumCRC32" not in answer:  # completion needs this entry
            del part["ChecksumCRC32"]
        return part | {"ETag": answer["ETag"]}

    def _complete(self) -> None:
        replaced = self._store.look(self._key) if self._replace else None
        try:
            self.complete()
        except RequestError as error:
            # A request with a lost answer may have succeeded. Names are unique: the size
            # decides, or a changed version of the replaced object.
            info = self._store.look(self._key) if error.is_ambiguous else None
            if info is not None and info.size_bytes == self._position and info != replaced:
                self._part = None
                self._abort_strangers()
                return
            if error.kind is Failure.CONDITION:
                raise self._store.taken(self.name) from error
            if self._upload_id is not None:
                raise self._ended() from error
            raise StorageError(f"{self._path}: {error}", path=self._path, op="finish") from error

    def complete(self) -> str:
        """Complete the upload and return the entity tag.

        Raises:
            RequestError: If ``condition`` does not hold, also for a repeated request whose first answer was
                lost.
        """
        if self._upload_id is None:
            data = bytes(memoryview(self._part.data)[: self._filled]) if self._part is not None else b""
            # A single request of any size: `S3Store.put` would begin another upload.
            etag = ObjectStore.put(self._store, self._key, data, self._condition)
        else:
            self._send()
            while self._sent:
                self._reap()
            complete = partial(
                self._store.bucket.ask,
                "complete_multipart_upload",
                Key=self._key,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": self._parts},
                **_conditions(self._condition),
            )
            refused = {Failure.MISSING, Failure.CONDITION}
            answer = self._store.requests.run("complete_upload", self._key, complete, answers=refused)
            etag = str(answer["ETag"])
        self._state = "finished"  # from here on, nothing is left to abort
        self._part = None
        self._abort_strangers()
        return etag

    def _abort_strangers(self) -> None:
        """Abort uploads of this name that began without an answer. Names are unique, so all belong to this
        writer.
        """
        if self._begun >= 2:
            self._store.abort_uploads(lambda name: name == self.name, logging.WARNING, self.name)

    def _throw_away(self) -> None:
        self._called_off.set()  # no more retries, for which the caller would wait
        for part in self._sent:
            part.cancel()
        wait(self._sent)
        self._sent.clear()
        self._part = None
        with clearing_up():
            if self._upload_id is not None:
                self._store.abort_upload(self._key, self._upload_id, logging.WARNING)
            self._abort_strangers()

    def _ended(self) -> CheckpointConflictError:
        """Return the error of an upload aborted by the save that won."""
        return CheckpointConflictError(
            f"the upload of {self._path} was aborted and its data discarded: another writer committed to "
            f"this id, or a clean-up removed the upload as remains of a killed save; save again with a "
            f"unique id",
            path=self._path,
        )


def _checksum(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def _conditions(condition: str | None) -> dict[str, str]:
    if condition is None:
        return {}
    return {"IfNoneMatch": "*"} if condition is ABSENT else {"IfMatch": condition}


def _range_info(key: str, answer: Mapping[str, Any], begin: int, size: int) -> ObjectInfo:
    if answer["ResponseMetadata"]["HTTPStatusCode"] != http.client.PARTIAL_CONTENT:
        total = answer.get("ContentLength", size + 1)
        if begin or total > size:
            raise RequestError(
                Failure.FINAL, "the service ignores range requests, which reading checkpoints requires"
            )
        return _info(key, answer, total)
    found = _RANGE.search(answer.get("ContentRange", ""))
    if found is None:
        raise RequestError(Failure.FINAL, "the service does not return the object's size (Content-Range)")
    if int(found[1]) != begin:  # sent by a faulty cache in between
        raise RequestError(Failure.PASSING, f"the response begins at byte {found[1]}, expected {begin}")
    return _info(key, answer, int(found[2]))


def _info(key: str, answer: Mapping[str, Any], size_bytes: int) -> ObjectInfo:
    modified = answer.get("LastModified")
    seconds = 0.0 if modified is None else modified.timestamp()
    return ObjectInfo(key, size_bytes, seconds, answer.get("ETag", ""))
