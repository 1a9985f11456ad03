"""S3 through s3fs: its session, credentials, options and event loop; the requests themselves are ours.

`S3FileSystem` gives whole files, or ranges as new bytes objects, repeats on its own terms, and has no
conditional completion of an upload. So the client that it manages is called directly: bodies stream into the
caller's memory, and every request is one attempt.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from isal.isal_zlib import crc32

from dcp.storage.errors import StorageError
from dcp.storage.stores.handles import Buffer, Inflow, Views
from dcp.storage.stores.objects.client import (
    ABSENT,
    CALLED_OFF,
    Condition,
    Failure,
    ListingPage,
    ObjectInfo,
    PartsClient,
    RequestError,
    Upload,
)
from dcp.storage.stores.objects.options import ObjectOptions
from dcp.storage.stores.objects.s3.closing import close_with
from dcp.storage.stores.objects.s3.direct import DirectReads, SignedUrl, presigned, range_of, sign
from dcp.storage.stores.objects.s3.errors import request_error
from dcp.storage.stores.objects.s3.http_bodies import SLOWEST_BYTES_PER_SECOND, STEP_BYTES

__all__ = ["S3Client"]

T = TypeVar("T")

_LEAST_BYTES_PER_SECOND: Final = 256 << 10
"""A part that is sent slower on the whole is given up, whatever trickles: stalled, not slow. Bodies that come
are large, and many share the line: see `SLOWEST_BYTES_PER_SECOND`."""

_CHUNK_BYTES: Final = 1 << 20
_CANCEL_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.5


class S3Client(PartsClient):
    """One bucket. ``storage_options`` are those of `s3fs.S3FileSystem`."""

    tells_size = True
    delete_limit = 1000

    def __init__(self, bucket: str, storage_options: Mapping[str, Any], options: ObjectOptions) -> None:
        super().__init__(bucket)
        try:
            from s3fs import S3FileSystem

            from dcp.storage.stores.objects.s3.session import OneAttemptSession, session_of
        except ImportError as error:
            raise StorageError(
                f"s3://{bucket} needs s3fs: pip install 'dcphub[s3]'", path=f"s3://{bucket}", op="open"
            ) from error
        given = dict(storage_options)
        wished = dict(given.pop("config_kwargs", None) or {})
        config = {
            "max_pool_connections": options.concurrency + 4,
            "connect_timeout": min(10.0, options.request_timeout_seconds),
            "read_timeout": options.request_timeout_seconds,
            # Checksums of what we send are ours; those of what we read are in the manifest.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "http_session_cls": OneAttemptSession,
            **wished,
            # Not hashed a second time: the CRC-32 of each upload is signed, and the service compares it.
            "s3": {"payload_signing_enabled": False, **(wished.get("s3") or {})},
            "retries": {"total_max_attempts": 1},
        }
        self.concurrency = options.concurrency
        self._timeout_seconds = options.request_timeout_seconds
        self._direct = DirectReads(bucket)
        try:
            self._fs: Any = S3FileSystem(**given, config_kwargs=config, skip_instance_cache=True)
            self._fs.session = self._fs.session or session_of(**self._fs.kwargs)
        except (TypeError, ValueError, KeyError) as error:
            names = ", ".join(sorted(given))
            raise StorageError(
                f"s3fs does not take these storage options ({names}): {type(error).__name__}",
                path=f"s3://{bucket}",
                op="open",
            ) from error
        close_with(self, self._fs)

    @property
    def creates_conditionally(self) -> bool | None:
        """Known of Amazon's own endpoints; whoever else speaks S3 has to show it."""
        host = urlsplit(str(self._call(self._endpoint))).hostname or ""
        return True if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) else None

    @property
    def replaces_conditionally(self) -> bool | None:
        """As `creates_conditionally`."""
        return self.creates_conditionally

    @property
    def identity(self) -> str:
        """What service and bucket this is, for what is found out once."""
        return f"{self._call(self._endpoint)}/{self.place}"

    async def _endpoint(self, s3: Any) -> str:
        return str(s3.meta.endpoint_url)

    # -- reading ---------------------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        """HeadObject."""
        return _info(key, self._request("head_object", Key=key))

    def get(self, key: str, begin: int, inflow: Inflow, *, etag: str | None = None) -> ObjectInfo:
        """GetObject with a range; the body goes to the buffers as it arrives."""
        size = inflow.size_bytes
        info = self._direct.get(
            key,
            begin,
            inflow,
            etag=etag,
            limit_seconds=self._limit_seconds(min(size, STEP_BYTES), SLOWEST_BYTES_PER_SECOND),
            make_url=self._signed_url,
        )
        if info is not None:
            return info
        arguments = {"Key": key, "Range": f"bytes={begin}-{begin + size - 1}"}
        if etag:
            arguments["IfMatch"] = etag

        async def fetch(s3: Any) -> ObjectInfo:
            answer = await s3.get_object(**self._arguments("get_object", arguments))
            async with answer["Body"] as body:
                total = _total_bytes(answer, begin, size)
                if total < begin + size:
                    raise RequestError(Failure.RANGE, f"the object has {total} bytes")
                await _fill(body, inflow)
            return _info(key, answer, total)

        return self._call(fetch, size, SLOWEST_BYTES_PER_SECOND)

    def _signed_url(self, key: str) -> SignedUrl | None:
        return self._call(lambda s3: sign(s3, self._arguments("get_object", {"Key": key})))

    def read(self, key: str, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """GetObject with a range from the beginning."""
        arguments = {"Key": key, "Range": f"bytes=0-{limit_bytes - 1}"}

        async def fetch(s3: Any) -> tuple[bytes, ObjectInfo]:
            answer = await s3.get_object(**self._arguments("get_object", arguments))
            async with answer["Body"] as body:
                total = _total_bytes(answer, 0, limit_bytes)
                data = bytearray(min(total, limit_bytes))
                await _fill(body, Views([memoryview(data)]))
            return bytes(data), _info(key, answer, total)

        try:
            return self._call(fetch, limit_bytes)
        except RequestError as error:
            if error.kind is not Failure.RANGE:
                raise
            info = self.head(key)  # an empty object has no first byte
            if info.size_bytes:
                raise RequestError(Failure.PASSING, "the object changed while it was read") from error
            return b"", info

    def list_page(self, prefix: str, *, shallow: bool, after: str | None) -> ListingPage:
        """ListObjectsV2."""
        arguments: dict[str, Any] = {"Prefix": prefix}
        if shallow:
            arguments["Delimiter"] = "/"
        if after is not None:
            arguments["ContinuationToken"] = after
        answer = self._request("list_objects_v2", **arguments)
        return ListingPage(
            [_listed(entry) for entry in answer.get("Contents") or ()],
            [str(entry["Prefix"]) for entry in answer.get("CommonPrefixes") or ()],
            str(answer["NextContinuationToken"]) if answer.get("IsTruncated") else None,
        )

    # -- writing ---------------------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer, condition: Condition = None) -> str:
        """PutObject; the service compares the CRC-32 with what it got."""
        body = bytes(data)
        arguments = {"Key": key, "Body": body, "ChecksumCRC32": _header(crc32(body))} | _conditions(condition)
        try:
            return str(self._request("put_object", len(body), **arguments)["ETag"])
        except RequestError as error:
            raise _as_condition(error, condition) from error

    def begin_upload(self, key: str) -> Upload:
        """CreateMultipartUpload."""
        answer = self._request("create_multipart_upload", Key=key, ChecksumAlgorithm="CRC32")
        return Upload(key, str(answer["UploadId"]))

    def put_part(self, upload: Upload, number: int, data: memoryview, crc: int) -> object:
        """UploadPart, with the CRC-32 that the service is to find."""
        arguments = {"Key": upload.key, "UploadId": upload.upload_id, "PartNumber": number}
        checksum = _header(crc)
        answer = self._request(
            "upload_part", len(data), Body=bytes(data), ChecksumCRC32=checksum, **arguments
        )
        part = {"PartNumber": number, "ETag": answer["ETag"]}
        # Only a service that has noted the checksum of the part knows what to do with it at the end.
        return part | ({"ChecksumCRC32": checksum} if "ChecksumCRC32" in answer else {})

    def complete_upload(self, upload: Upload, parts: Sequence[object], condition: Condition) -> str:
        """CompleteMultipartUpload."""
        arguments = {"Key": upload.key, "UploadId": upload.upload_id, "MultipartUpload": {"Parts": [*parts]}}
        try:
            answer = self._request("complete_multipart_upload", **arguments, **_conditions(condition))
        except RequestError as error:
            if isinstance(condition, str):
                raise _as_condition(error, condition) from error
            raise
        return str(answer["ETag"])

    def abort_upload(self, upload: Upload) -> None:
        """AbortMultipartUpload."""
        try:
            self._request("abort_multipart_upload", Key=upload.key, UploadId=upload.upload_id)
        except RequestError as error:
            if error.kind is not Failure.MISSING:
                raise

    def uploads(self, prefix: str) -> list[Upload]:
        """ListMultipartUploads."""
        found: list[Upload] = []
        arguments: dict[str, Any] = {"Prefix": prefix}
        while True:
            page = self._request("list_multipart_uploads", **arguments)
            found += [Upload(str(one["Key"]), str(one["UploadId"])) for one in page.get("Uploads") or ()]
            if not page.get("IsTruncated"):
                return found
            arguments["KeyMarker"] = page["NextKeyMarker"]
            arguments["UploadIdMarker"] = page.get("NextUploadIdMarker", "")

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """DeleteObject or DeleteObjects."""
        if len(keys) == 1:
            try:
                self._request("delete_object", Key=keys[0])
            except RequestError as error:
                if error.kind is not Failure.MISSING:
                    raise
            return {}
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        answer = self._request("delete_objects", Delete=wanted)
        return {
            str(one.get("Key")): f"{one.get('Code')}: {one.get('Message')}"
            for one in answer.get("Errors") or ()
            if one.get("Code") != "NoSuchKey"
        }

    def delete_if(self, key: str, etag: str) -> None:
        """DeleteObject with If-Match; a service that does not know that ignores it, or says so."""
        try:
            self._request("delete_object", Key=key, IfMatch=etag)
        except RequestError as error:
            if error.kind is not Failure.FINAL or "NotImplemented" not in str(error):
                raise
            self._request("delete_object", Key=key)

    def presigned_url(self, key: str, seconds: int) -> str:
        """A URL that anybody may GET the object by for ``seconds``; computed here, without a request."""

        async def sign(s3: Any) -> str:
            arguments = self._arguments("get_object", {"Key": key})
            return await presigned(s3, arguments, seconds)

        return self._call(sign)

    # -- one attempt -----------------------------------------------------------------------------------------

    def _request(self, method: str, size_bytes: int = 0, /, **arguments: Any) -> dict[str, Any]:
        async def ask(s3: Any) -> dict[str, Any]:
            answer: dict[str, Any] = await getattr(s3, method)(**self._arguments(method, arguments))
            return answer

        return self._call(ask, size_bytes)

    def _arguments(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        # With what the user set for all requests: server-side encryption, requester pays, ...
        merged: dict[str, Any] = self._fs._get_s3_method_kwargs(
            _MethodName(method), Bucket=self.place, **arguments
        )
        return merged

    def _limit_seconds(self, size_bytes: int, least_bytes_per_second: int) -> float:
        """How long one attempt may take."""
        return 4 * self._timeout_seconds + size_bytes / least_bytes_per_second

    def _call(
        self,
        ask: Callable[[Any], Awaitable[T]],
        size_bytes: int = 0,
        least_bytes_per_second: int = _LEAST_BYTES_PER_SECOND,
    ) -> T:
        """Run one attempt on s3fs' event loop, and have it ended when this returns, however it returns."""
        limit = self._limit_seconds(size_bytes, least_bytes_per_second)
        ended = threading.Event()

        async def attempt() -> T:
            try:
                await self._fs.set_session()
                return await asyncio.wait_for(ask(await self._fs.get_s3(self.place)), limit)
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(attempt(), self._fs.loop)
        called_off = CALLED_OFF.get()
        try:
            while not wait([future], _LOOK_SECONDS).done:
                if called_off is not None and called_off.is_set():
                    raise RequestError(Failure.PASSING, "called off")
            return future.result()
        except RequestError:
            raise
        except Exception as error:
            raise request_error(error, self.place) from error
        finally:
            if not future.done() or future.cancelled():  # interrupted: nothing may arrive after we have left
                future.cancel()
                ended.wait(_CANCEL_SECONDS)


class _MethodName:
    """What `S3FileSystem` wants to know of a method: its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


async def _fill(body: Any, inflow: Inflow) -> None:
    """All buffers from the body, which must have exactly their size."""
    size, done = inflow.size_bytes, 0
    buffers = inflow.buffers()
    room = next(buffers, None)
    async for chunk in body.iter_chunks(_CHUNK_BYTES):
        data = memoryview(chunk)
        done += len(data)
        while len(data) and room is not None:
            part = data[: len(room)]
            room[: len(part)] = part
            data, room = data[len(part) :], room[len(part) :]
            if not len(room):
                room = next(buffers, None)
        if done > size:
            break
    if done != size:
        raise RequestError(Failure.PASSING, f"the body had {done} bytes instead of {size}")


def _total_bytes(answer: Mapping[str, Any], begin: int, size: int) -> int:
    """The size of the object, of which the answer has the range that was asked for."""
    content_range = answer.get("ContentRange")
    if content_range:
        got = range_of(str(content_range))
        if got is None:
            raise RequestError(Failure.FINAL, f"the service does not tell how long it is: {content_range!r}")
        if got[0] != begin:
            raise RequestError(Failure.PASSING, f"bytes from {got[0]} on came instead of {begin}")
        return got[1]
    total = int(answer["ContentLength"])
    if begin or total > size:
        raise RequestError(Failure.FINAL, "the service ignores ranges; it cannot be read from")
    return total


def _info(key: str, answer: Mapping[str, Any], size_bytes: int | None = None) -> ObjectInfo:
    size = int(answer["ContentLength"]) if size_bytes is None else size_bytes
    return ObjectInfo(key, size, _seconds(answer), str(answer.get("ETag", "")))


def _listed(entry: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(str(entry["Key"]), int(entry["Size"]), _seconds(entry), str(entry.get("ETag", "")))


def _seconds(answer: Mapping[str, Any]) -> float:
    """Whole seconds, as HTTP's headers have them: listings are finer, and must not differ."""
    return float(int(answer["LastModified"].timestamp()))


def _header(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def _conditions(condition: Condition) -> dict[str, str]:
    if condition is ABSENT:
        return {"IfNoneMatch": "*"}
    return {"IfMatch": condition} if isinstance(condition, str) else {}


def _as_condition(error: RequestError, condition: Condition) -> RequestError:
    """Replacing what is not there is answered with 404."""
    if isinstance(condition, str) and error.kind is Failure.MISSING:
        return RequestError(Failure.CONDITION, str(error))
    return error
