"""Plain S3 requests of several clients: multipart PUT and parallel ranged GET.

Nothing is planned, described, compared or repeated. Request bodies are bytes objects in memory; responses go
to memory that was written before.
"""

from __future__ import annotations

import asyncio
import http.client
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.processes import Progress
from benchmarks.s3.service import Buckets, S3Service

__all__ = ["CLIENTS", "RawLoops", "Setting"]

_ARENA_BYTES = 64 << 20
_TRIED_BYTES = 256 << 20
_READ_BYTES = 1 << 20


class Setting(NamedTuple):
    """Bytes per request, and requests in flight."""

    part_bytes: int
    at_a_time: int


_SETTINGS = tuple(
    Setting(size << 20, count) for size, count in ((8, 4), (8, 8), (8, 16), (16, 4), (16, 8), (32, 4))
)
"""Parts of S3 have at least 5 MiB, and more than two cores can serve is not under way anyway."""

_Pieces = Sequence[tuple[int, memoryview]]
"""Offset of each piece in the object, and its memory."""


class RawClient(ABC):
    """A Python client for S3. Raises ImportError if its package is missing."""

    operations: tuple[str, ...] = ("put", "get")
    """Operations that the client implements itself."""

    def __init__(self, service: S3Service) -> None:
        self._service = service

    @abstractmethod
    def put(self, bucket: str, key: str, parts: Sequence[bytes], setting: Setting) -> None:
        """Upload the parts as one object."""

    @abstractmethod
    def get(self, bucket: str, key: str, pieces: _Pieces, setting: Setting) -> None:
        """Fetch all pieces, one request each."""


class BotocoreClient(RawClient):
    """botocore in threads; bodies are read in place."""

    def __init__(self, service: S3Service) -> None:
        super().__init__(service)
        self._client = service.client()

    def put(self, bucket: str, key: str, parts: Sequence[bytes], setting: Setting) -> None:
        """Upload parts from a thread pool."""
        where = {"Bucket": bucket, "Key": key}
        where["UploadId"] = self._client.create_multipart_upload(**where)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            answer = self._client.upload_part(**where, PartNumber=number, Body=parts[number - 1])
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(setting.at_a_time) as pool:
            sent = list(pool.map(send, range(1, len(parts) + 1)))
        self._client.complete_multipart_upload(**where, MultipartUpload={"Parts": sent})

    def get(self, bucket: str, key: str, pieces: _Pieces, setting: Setting) -> None:
        """Fetch pieces in a thread pool."""

        def fetch(piece: tuple[int, memoryview]) -> None:
            begin, target = piece
            body = self._client.get_object(Bucket=bucket, Key=key, Range=_range(begin, target))["Body"]
            _receive(body, target, len(target))

        with ThreadPoolExecutor(setting.at_a_time) as pool:
            list(pool.map(fetch, pieces))


class SignedUrlClient(BotocoreClient):
    """http.client in threads, with a URL that botocore signed once; bodies are received in place."""

    operations = ("get",)

    def get(self, bucket: str, key: str, pieces: _Pieces, setting: Setting) -> None:
        """Fetch pieces in a thread pool, one connection per thread."""
        where = {"Bucket": bucket, "Key": key}
        url = urlsplit(self._client.generate_presigned_url("get_object", Params=where))
        local = threading.local()

        def connection() -> http.client.HTTPConnection:
            if not hasattr(local, "connection"):
                local.connection = http.client.HTTPConnection(str(url.hostname), url.port)
            kept: http.client.HTTPConnection = local.connection
            return kept

        def fetch(piece: tuple[int, memoryview]) -> None:
            begin, target = piece
            connection().request("GET", f"{url.path}?{url.query}", headers={"Range": _range(begin, target)})
            body = connection().getresponse()
            if body.status != http.client.PARTIAL_CONTENT or body.length != len(target):
                raise OSError(f"{body.status} with {body.length} bytes instead of {len(target)}")
            _receive(body, target, _READ_BYTES)

        with ThreadPoolExecutor(setting.at_a_time) as pool:
            list(pool.map(fetch, pieces))


def _receive(body: Any, target: memoryview, most_bytes: int) -> None:
    """Receive a whole body by reads of limited size."""
    done = 0
    while done < len(target):
        count = body.readinto(target[done : done + most_bytes])
        if not count:
            raise OSError(f"a body of {len(target)} bytes ended after {done}")
        done += count


class S3fsClient(RawClient):
    """The client of s3fs, on its event loop; bodies are copied into place."""

    def __init__(self, service: S3Service) -> None:
        super().__init__(service)
        from fsspec.asyn import sync
        from s3fs import S3FileSystem

        config = {
            "max_pool_connections": 64,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"payload_signing_enabled": False},
        }
        self._fs: Any = S3FileSystem(config_kwargs=config, skip_instance_cache=True)
        self._sync: Any = sync
        self._sync(self._fs.loop, self._fs.set_session)

    def put(self, bucket: str, key: str, parts: Sequence[bytes], setting: Setting) -> None:
        """Upload parts as tasks of the event loop."""

        async def upload() -> None:
            client = await self._fs.get_s3(bucket)
            where = {"Bucket": bucket, "Key": key}
            where["UploadId"] = (await client.create_multipart_upload(**where))["UploadId"]

            async def send(number: int) -> dict[str, Any]:
                answer = await client.upload_part(**where, PartNumber=number, Body=parts[number - 1])
                return {"PartNumber": number, "ETag": answer["ETag"]}

            numbers = range(1, len(parts) + 1)
            sent = await _at_a_time(setting.at_a_time, (send(number) for number in numbers))
            await client.complete_multipart_upload(**where, MultipartUpload={"Parts": sent})

        self._sync(self._fs.loop, upload)

    def get(self, bucket: str, key: str, pieces: _Pieces, setting: Setting) -> None:
        """Fetch pieces as tasks of the event loop."""

        async def fetch(client: Any, begin: int, target: memoryview) -> None:
            answer = await client.get_object(Bucket=bucket, Key=key, Range=_range(begin, target))
            done = 0
            async with answer["Body"] as body:
                async for chunk in body.iter_chunks(_READ_BYTES):
                    target[done : done + len(chunk)] = chunk
                    done += len(chunk)
            if done != len(target):
                raise OSError(f"a body of {len(target)} bytes ended after {done}")

        async def download() -> None:
            client = await self._fs.get_s3(bucket)
            await _at_a_time(setting.at_a_time, (fetch(client, *piece) for piece in pieces))

        self._sync(self._fs.loop, download)


class ObstoreClient(RawClient):
    """The Rust client; bodies are copied into place."""

    def __init__(self, service: S3Service) -> None:
        super().__init__(service)
        self._module: Any = import_module("obstore")

    def _store(self, bucket: str) -> Any:
        given = self._service.environment
        return import_module("obstore.store").S3Store(
            bucket,
            endpoint=self._service.endpoint_url,
            access_key_id=given["AWS_ACCESS_KEY_ID"],
            secret_access_key=given["AWS_SECRET_ACCESS_KEY"],
            region=self._service.region,
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={"allow_http": True},
        )

    def put(self, bucket: str, key: str, parts: Sequence[bytes], setting: Setting) -> None:
        """Use obstore's own multipart upload."""
        size, count = setting
        store = self._store(bucket)
        self._module.put(store, key, iter(parts), use_multipart=True, chunk_size=size, max_concurrency=count)

    def get(self, bucket: str, key: str, pieces: _Pieces, setting: Setting) -> None:
        """Fetch pieces in a thread pool."""
        store = self._store(bucket)

        def fetch(piece: tuple[int, memoryview]) -> None:
            begin, target = piece
            target[:] = memoryview(self._module.get_range(store, key, start=begin, length=len(target)))

        with ThreadPoolExecutor(setting.at_a_time) as pool:
            list(pool.map(fetch, pieces))


CLIENTS: dict[str, type[RawClient]] = {
    "s3fs": S3fsClient,
    "botocore": BotocoreClient,
    "http.client": SignedUrlClient,
    "obstore": ObstoreClient,
}


def _range(begin: int, target: memoryview) -> str:
    return f"bytes={begin}-{begin + len(target) - 1}"


async def _at_a_time(count: int, jobs: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results in order, with at most ``count`` calls running."""
    gate = asyncio.Semaphore(count)

    async def run(job: Coroutine[Any, Any, Any]) -> Any:
        async with gate:
            return await job

    return await asyncio.gather(*(run(job) for job in jobs))


class RawLoops:
    """All installed clients, each with its best setting, on the bytes of a state."""

    def __init__(self, service: S3Service, size_bytes: int, buckets: Buckets, progress: Progress) -> None:
        self.size_bytes = size_bytes
        self._buckets = buckets
        self._clients = {
            name: kind(service) for name, kind in CLIENTS.items() if name != "obstore" or find_spec("obstore")
        }
        arena = os.urandom(1 << 20) * (_ARENA_BYTES >> 20)
        self._parts = {
            size: [arena[at : at + size] for at in range(0, _ARENA_BYTES, size)]
            for size in {setting.part_bytes for setting in _SETTINGS}
        }
        self._memory = memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for begin in range(0, size_bytes, mmap.PAGESIZE):
            self._memory[begin] = 1
        self._bucket = buckets.make()
        self._best = {"put": self._try("put", progress), "get": self._try("get", progress)}
        self._put("botocore", self._bucket, "kept", size_bytes, self._best["put"]["botocore"])

    def names(self, operation: str) -> tuple[str, ...]:
        """Return the installed clients that implement "put" or "get"."""
        return tuple(name for name, client in self._clients.items() if operation in client.operations)

    @property
    def settings(self) -> dict[str, dict[str, Setting]]:
        """Return the best setting by "put" and "get", then by client."""
        return self._best

    def put(self, name: str, bucket: str) -> None:
        """Upload all bytes as one object of ``bucket``."""
        self._put(name, bucket, "raw", self.size_bytes, self._best["put"][name])

    def get(self, name: str) -> None:
        """Fetch all bytes into memory."""
        self._get(name, self.size_bytes, self._best["get"][name])

    def close(self) -> None:
        """Remove the objects."""
        self._buckets.remove(self._bucket)

    def _put(self, name: str, bucket: str, key: str, size_bytes: int, setting: Setting) -> None:
        ready, size = self._parts[setting.part_bytes], setting.part_bytes
        parts = [ready[number % len(ready)] for number in range(-(-size_bytes // size))]
        parts[-1] = parts[-1][: size_bytes - (len(parts) - 1) * size]
        self._clients[name].put(bucket, key, parts, setting)

    def _get(self, name: str, size_bytes: int, setting: Setting, key: str = "kept") -> None:
        size = setting.part_bytes
        begins = range(0, size_bytes, size)
        pieces = [(begin, self._memory[begin : min(begin + size, size_bytes)]) for begin in begins]
        self._clients[name].get(self._bucket, key, pieces, setting)

    def _try(self, what: str, progress: Progress) -> dict[str, Setting]:
        """Find each client's best setting with at most a quarter of a GiB."""
        size_bytes = min(self.size_bytes, _TRIED_BYTES)
        found = {}
        for name in self.names(what):
            seconds: dict[Setting, float] = {}
            for setting in _SETTINGS:
                begun = time.perf_counter()
                if what == "put":
                    self._put(name, self._bucket, "tried", size_bytes, setting)
                else:
                    self._get(name, size_bytes, setting, "tried")
                seconds[setting] = time.perf_counter() - begun
            best = found[name] = min(seconds, key=seconds.__getitem__)
            progress(
                f"raw {what}, {name}: best with {best.at_a_time} x {best.part_bytes >> 20} MiB, "
                f"{size_bytes / seconds[best] / 1e9:.3f} GB/s"
            )
        return found
