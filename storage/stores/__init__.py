"""Moving bytes: where checkpoints are kept, behind one small interface. Imports no torch.

A kind of store is a file here, or anybody's (`register_store`), with its URL schemes and its capabilities as
data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dcp.storage.errors import StorageError
from dcp.storage.stores.base import ANY, Capabilities, FileInfo, ReadOnlyStore, Store, StoreType, Version
from dcp.storage.stores.handles import Buffer, ReadHandle, WriteHandle
from dcp.storage.stores.memory import MemoryStore
from dcp.storage.stores.names import check_name, place_text
from dcp.storage.stores.posix.store import PosixStore
from dcp.storage.stores.registry import known_schemes, register_store, store_type_of

__all__ = [
    "ANY",
    "Buffer",
    "Capabilities",
    "FileInfo",
    "MemoryStore",
    "OpenStore",
    "PosixStore",
    "ReadHandle",
    "ReadOnlyStore",
    "Store",
    "StoreType",
    "Version",
    "WriteHandle",
    "check_name",
    "open_store",
    "register_store",
    "type_of_place",
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
    `dcp.storage.stores.objects.options.ObjectOptions`. Nothing is touched yet. Raises `StorageError` for what
    names no place, an unknown scheme and options where none apply; for a missing package the first operation
    does.
    """
    text = place_text(checkpoint_id)
    store_type = type_of_place(text)
    if storage_options and not store_type.takes_options:
        raise StorageError(
            f"{text!r} takes no storage options, and was given {', '.join(sorted(storage_options))}",
            path=text,
            op="open",
        )
    return store_type.open(text, storage_options)


def type_of_place(place: str) -> StoreType:
    """The kind of store of a path or URL. Raises `StorageError` for what names no place."""
    url = _URL.fullmatch(place)
    if url is None and ":" in place:
        _refuse_mangled(place)
    return store_type_of(url[1].lower() if url is not None else "file")


def _refuse_mangled(text: str) -> None:
    """Raise StorageError for a path that was a URL once, rather than make a local folder of its scheme."""
    # pathlib takes two slashes of a URL for one
    schemes = "|".join(map(re.escape, known_schemes()))
    mangled = re.fullmatch(rf"(?:.*/)?({schemes}):(/.*)?", text, re.DOTALL | re.IGNORECASE)
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
