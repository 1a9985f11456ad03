"""Which URLs are of object services, told without importing what speaks to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dcp.storage.stores.base import Store, StoreType

__all__ = ["STORE_TYPE"]


def _open(url: str, options: Mapping[str, Any] | None) -> Store:
    from dcp.storage.stores.objects.store import FsspecStore  # only here: most do without fsspec

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
