"""What URLs of object stores name: a bucket of S3 and a prefix, or a place in a file system of fsspec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import fsspec

from dcp.storage.errors import StorageError
from dcp.storage.stores.objects.client import ObjectClient
from dcp.storage.stores.objects.options import ObjectOptions

__all__ = ["bucket_and_prefix", "client_for"]

_S3_URL: Final = re.compile(r"s3a?://([^/]+)/?(.*)", re.DOTALL)


def bucket_and_prefix(url: str) -> tuple[str, str] | None:
    """(bucket, prefix with its ``/``, or "") of S3; None for another file system that fsspec has.

    Raises `StorageError` for what is neither.
    """
    if "::" in url:
        raise StorageError(f"{url}: chained file systems cannot hold checkpoints", path=url, op="open")
    scheme = url.partition("://")[0]
    if scheme not in fsspec.available_protocols() and scheme not in fsspec.registry:
        raise StorageError(
            "Cannot detect which StorageReader or StorageWriter to use: "
            f"no store is known for {url!r}: neither dcp nor fsspec knows the scheme; use a path, "
            "file://, memory://, s3:// or another one of fsspec's",
            path=url,
            op="open",
        )
    s3 = _S3_URL.fullmatch(url.rstrip("/"))
    if s3 is None and scheme in ("s3", "s3a"):
        raise StorageError(f"{url!r} names no bucket; use s3://bucket/prefix", path=url, op="open")
    return (s3[1], f"{s3[2]}/" if s3[2] else "") if s3 else None


def client_for(
    url: str, bucket: str | None, storage_options: Mapping[str, Any], options: ObjectOptions
) -> ObjectClient:
    """A client of the bucket, or of the file system of ``url``; no request is made."""
    if bucket is not None:
        from dcp.storage.stores.objects.s3.service import S3Client

        return S3Client(bucket, storage_options, options)
    from dcp.storage.stores.objects.generic.service import FsspecClient, open_filesystem

    return FsspecClient(open_filesystem(url, storage_options), options)
