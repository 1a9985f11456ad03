"""Moving bytes: where checkpoints are kept, behind one small interface. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from dcp.storage.errors import StorageError
from dcp.storage.stores.base import (
    ANY,
    Buffer,
    FileInfo,
    ReadHandle,
    Store,
    Version,
    WriteHandle,
    check_name,
)
from dcp.storage.stores.memory import MemoryStore
from dcp.storage.stores.posix import PosixStore

__all__ = [
    "ANY",
    "Buffer",
    "FileInfo",
    "MemoryStore",
    "OpenStore",
    "PosixStore",
    "ReadHandle",
    "Store",
    "Version",
    "WriteHandle",
    "check_name",
    "open_store",
]

OpenStore: TypeAlias = Callable[[str | os.PathLike[str]], Store]
"""What makes the store of a checkpoint id, as `open_store` does."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)


def open_store(
    checkpoint_id: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Store:
    """The store of a checkpoint: a path, ``file:///path``, ``memory://name`` (this process only), ``s3://``
    or any other URL that fsspec has a file system for.

    ``storage_options`` are those of the file system, as all users of fsspec pass them, and ours of
    `dcp.storage.stores.objects.options.ObjectOptions`. Nothing is touched yet. Raises `StorageError` for an
    unknown scheme, for a missing package, and for options where none apply.
    """
    text = os.fspath(checkpoint_id)
    url = _URL.fullmatch(text)
    scheme = url[1].lower() if url is not None else "file"
    if scheme not in ("file", "memory"):
        from dcp.storage.stores.objects.store import FsspecStore

        return FsspecStore(text, storage_options)
    if storage_options:
        raise StorageError(
            f"{text!r} takes no storage options, and was given {', '.join(sorted(storage_options))}",
            path=text,
            op="open",
        )
    if url is None:
        return PosixStore(text)
    if scheme == "memory":
        return MemoryStore(url[2])
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise StorageError(f"{text!r} names no local file: write file:///absolute/path", path=text, op="open")
    return PosixStore(unquote(parts.path))
