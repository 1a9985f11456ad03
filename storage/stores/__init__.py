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
    place_text,
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

_MANGLED = re.compile(
    r"(?:.*/)?(s3|s3a|gs|gcs|abfss?|az|adl|hf|oci|oss|hdfs|https?|s?ftp|file|memory):(/.*)?",
    re.DOTALL | re.IGNORECASE,
)
"""What pathlib makes of a URL: it takes two slashes for one."""


def open_store(
    checkpoint_id: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Store:
    """The store of a checkpoint: a path, ``file:///path``, ``memory://name`` (this process only), ``s3://``
    or any other URL that fsspec has a file system for.

    ``storage_options`` are those of the file system, as all users of fsspec pass them, and ours of
    `dcp.storage.stores.objects.options.ObjectOptions`. Nothing is touched yet. Raises `StorageError` for what
    names no place, an unknown scheme and options where none apply; for a missing package the first operation
    does.
    """
    text = place_text(checkpoint_id)
    url = _URL.fullmatch(text)
    if url is None:
        _refuse_mangled(text)
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


def _refuse_mangled(text: str) -> None:
    """Raise StorageError for a path that was a URL once, rather than make a local folder of its scheme."""
    mangled = _MANGLED.fullmatch(text)
    if mangled is not None:
        slashes = "///" if mangled[1].lower() == "file" else "//"
        meant = f"{mangled[1]}:{slashes}{(mangled[2] or '').lstrip('/')}"
        raise StorageError(
            f"{text!r} is a URL that lost a slash, as pathlib.Path and os.path.normpath take one from it: "
            f"give {meant!r}, as a string",
            path=text,
            op="open",
        )
    if "://" in text:
        raise StorageError(
            f"{text!r}: URLs that are chained or have anything before their scheme are not supported",
            path=text,
            op="open",
        )
