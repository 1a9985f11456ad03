"""Object stores: S3 and whatever else fsspec reaches, behind the store interface.

`store` has what all have in common; `s3` and `filesystem` say how one request is made, and `requests` repeats
what fails in passing. Imports no torch, and s3fs only when an ``s3://`` store makes its first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dcp.storage.stores.base import Store, StoreType


def _open(url: str, options: Mapping[str, Any] | None) -> Store:
    # Only here: most do without fsspec.
    if url.startswith(("s3://", "s3a://")):
        from dcp.storage.stores.objects.s3 import S3Store

        return S3Store(url, options)
    from dcp.storage.stores.objects.filesystem import FsspecStore

    return FsspecStore(url, options)


STORE_TYPE: Final = StoreType(
    schemes=(
        *("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "hf", "oci", "oss"),
        *("hdfs", "http", "https", "ftp", "sftp"),
    ),
    open=_open,
    takes_options=True,
)
"""The usual ones; whatever else fsspec has a file system for is opened by this type as well."""
