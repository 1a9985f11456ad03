"""Moving bytes: where checkpoints are kept, behind one small interface. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeAlias
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


def open_store(checkpoint_id: str | os.PathLike[str]) -> Store:
    """The store of a checkpoint: a path, ``file:///path``, or ``memory://name`` (this process only).

    Nothing is touched yet. Raises `StorageError` for any other scheme.
    """
    text = os.fspath(checkpoint_id)
    url = _URL.fullmatch(text)
    if url is None:
        return PosixStore(text)
    scheme, rest = url[1].lower(), url[2]
    if scheme == "memory":
        return MemoryStore(rest)
    if scheme != "file":
        raise StorageError(
            f"no store is known for {text!r}: the scheme {scheme}:// is not supported; use a path, file:// or memory://",
            path=text,
            op="open",
        )
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise StorageError(f"{text!r} names no local file: write file:///absolute/path", path=text, op="open")
    return PosixStore(unquote(parts.path))
