"""Stores: move bytes between the library and a disk, an object store or memory, behind a small interface.
Imports no torch.

Each kind of store is a module here, or comes from another package (`register_store`), with URL schemes and
capabilities as data.
"""

from __future__ import annotations

from dcp.storage.stores.base import (
    ANY,
    Buffer,
    Capabilities,
    FileInfo,
    ReadHandle,
    ReadOnlyStore,
    Store,
    StoreType,
    Version,
    WriteHandle,
    check_name,
)
from dcp.storage.stores.memory import MemoryStore
from dcp.storage.stores.opening import OpenStore, open_store, register_store, type_of_place
from dcp.storage.stores.posix.store import PosixStore

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
