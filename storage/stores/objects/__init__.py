"""Object stores: S3 and other fsspec file systems behind the store interface.

`store` has the common part, `s3` and `filesystem` the requests of each kind, and `requests` the retries.
Imports no torch; imports s3fs at the first request of an ``s3://`` store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dcp.storage.stores.base import Store, StoreType


def _open(url: str, options: Mapping[str, Any] | None) -> Store:
    # Imported on use, because most users do not need fsspec.
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
"""Store type of common schemes; also opens all other schemes known to fsspec."""
