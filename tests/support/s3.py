"""Contents of an S3 server, read and changed by botocore without retries, independent of dcp."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import botocore.session
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config

from dcp.demo.s3_server import S3Server
from dcp.storage.stores.objects.bucket import session_of

__all__ = ["RawS3", "S3Server", "raw_s3", "split_url"]

_THREADS = 16
_CONNECTIONS = 4

# Share the parsed service descriptions (20 MiB each) between all sessions, including those of s3fs.
botocore.session.create_loader = lambda _: session_of().get_component("data_loader")


class _Reachable(Protocol):
    @property
    def storage_options(self) -> dict[str, Any]: ...


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and key (or prefix) of ``s3://BUCKET/KEY``."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


class RawS3:
    """Plain requests by URL: ``s3://BUCKET/KEY``."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def list(self, url: str) -> dict[str, int]:
        """Return the sizes in bytes of all objects whose URL begins with ``url``, by the rest of the URL."""
        bucket, prefix = split_url(url)
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return {
            item["Key"].removeprefix(prefix).removeprefix("/"): int(item["Size"])
            for page in pages
            for item in page.get("Contents", [])
        }

    def read(self, url: str) -> bytes:
        """Return the whole object."""
        bucket, key = split_url(url)
        data: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def write(self, url: str, data: bytes) -> str:
        """Put an object, replacing any existing one; return its entity tag."""
        bucket, key = split_url(url)
        return str(self.client.put_object(Bucket=bucket, Key=key, Body=data)["ETag"])

    def write_many(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Put several objects concurrently. Only the signatures are made by botocore: a thousand of its
        requests take seconds of CPU time."""
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(self._write_some, (objects[n::_CONNECTIONS] for n in range(_CONNECTIONS))))

    def _write_some(self, objects: Sequence[tuple[str, bytes]]) -> None:
        where = urlsplit(self.client.meta.endpoint_url)
        signer = S3SigV4Auth(self.client._request_signer._credentials, "s3", self.client.meta.region_name)
        with closing(http.client.HTTPConnection(where.netloc)) as connection:
            for url, data in objects:
                path = quote("/{}/{}".format(*split_url(url)))
                request = AWSRequest("PUT", where.geturl() + path, data=data)
                signer.add_auth(request)
                connection.request("PUT", path, data, dict(request.headers))
                with connection.getresponse() as answer:
                    assert answer.status == http.client.OK, answer.read()
                    answer.read()

    def delete(self, url: str) -> None:
        """Delete an object; a missing object is no error."""
        bucket, key = split_url(url)
        self.client.delete_object(Bucket=bucket, Key=key)

    def begin_upload(self, url: str) -> str:
        """Begin a multipart upload, like a writer that is killed afterwards; return its id."""
        bucket, key = split_url(url)
        return str(self.client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"])

    def uploads(self, url: str) -> dict[str, str]:
        """Return the unfinished multipart uploads of keys that begin with ``url``: keys by upload id."""
        bucket, prefix = split_url(url)
        answer = self.client.list_multipart_uploads(Bucket=bucket, Prefix=prefix)
        return {item["UploadId"]: item["Key"] for item in answer.get("Uploads", [])}


@cache
def _session() -> botocore.session.Session:
    return botocore.session.get_session()


@contextmanager
def raw_s3(server: _Reachable) -> Iterator[RawS3]:
    """Yield a client of ``server``, or of any object with ``storage_options``."""
    options = server.storage_options
    client = _session().create_client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name=options["client_kwargs"]["region_name"],
        config=Config(
            retries={"total_max_attempts": 1},
            read_timeout=60,
            max_pool_connections=_THREADS,
            s3={"addressing_style": "path"},
            proxies={},
        ),
    )
    try:
        yield RawS3(client)
    finally:
        client.close()
