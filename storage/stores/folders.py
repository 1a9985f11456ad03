"""The places below a root: the folders of a training run's checkpoints, found without opening each of them.

A `Store` is one flat folder. A `Root` is what has many of them directly below it, and answers which there are
and which of them are committed with as few requests as its kind allows. One kind is one class here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from dcp.storage.errors import CheckpointFormatError, StorageError
from dcp.storage.formats.manifest import MANIFEST_NAME, METADATA_NAME
from dcp.storage.formats.open import is_commit_object
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import FileInfo, Store, check_name
from dcp.storage.stores.memory import MemoryStore, folder_names
from dcp.storage.stores.posix import PosixStore
from dcp.storage.stores.posix_files import storage_error

__all__ = ["Found", "MemoryRoot", "PosixRoot", "Root", "open_root"]

Found = dict[str, FileInfo]
"""Small files of one folder by name; what else is in the folder was not looked at."""


class Root(ABC):
    """A place with stores directly below it. Errors are those of `Store`."""

    url: str
    """Names the place in messages; that of a folder is ``url/name``."""

    def __init__(self, url: str, open_store: OpenStore) -> None:
        self.url = url
        self._open_store = open_store

    @abstractmethod
    def exists(self) -> bool:
        """Whether the place is there. Kinds without folders, which have nothing to make, say yes."""

    @abstractmethod
    def make(self) -> None:
        """Create the place and its parents, durably; fine if it is there."""

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the folders directly below that could be checkpoints, sorted: one listing.

        None of them is opened. ``[]`` if the place does not exist.
        """

    def store(self, name: str) -> Store:
        """The folder ``name`` as a store; nothing is touched. Raises `CheckpointFormatError` for a path."""
        return self._open_store(f"{self.url.rstrip('/')}/{check_name(name)}")

    def look(self, also: Collection[str] = ()) -> dict[str, Found]:
        """Every folder with the commit objects in it, and with those of the files ``also`` that are there.

        Costs one listing and a request for each file asked for; no file is read. Object stores answer from
        one listing of everything below. A folder that vanishes meanwhile is listed as empty.
        """
        return {name: self.look_into(name, also) for name in self.names()}

    def committed(self, also: Collection[str] = ()) -> dict[str, Found]:
        """The folders that have a commit object; else as `look`."""
        return {name: files for name, files in self.look(also).items() if any(map(is_commit_object, files))}

    def look_into(self, name: str, also: Collection[str] = ()) -> Found:
        """One folder, as `look`; empty if it is not there."""
        store = self.store(name)
        wanted = (MANIFEST_NAME, METADATA_NAME, *also)
        found = {name: info for name in wanted if (info := store.stat(name)) is not None}
        if not any(map(is_commit_object, found)):  # a save by single ranks, or none
            found |= {info.name: info for info in store.list() if is_commit_object(info.name)}
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class PosixRoot(Root):
    """A folder of folders."""

    def exists(self) -> bool:
        """Whether it is a folder, perhaps behind a symbolic link."""
        return Path(self.url).is_dir()

    def make(self) -> None:
        """Each folder that is new is made durable in its parent."""
        PosixStore(self.url).make_root()

    def names(self) -> list[str]:
        """Folders, also behind symbolic links; names that no checkpoint may have are left out."""
        found = []
        try:
            with os.scandir(self.url) as entries:
                for entry in entries:
                    if entry.is_dir() and _is_allowed(entry.name):
                        found.append(entry.name)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(error, "list", self.url) from error
        return sorted(found)


class MemoryRoot(Root):
    """Stores in the memory of this process whose names begin alike."""

    def exists(self) -> bool:
        """Always."""
        return True

    def make(self) -> None:
        """Nothing to do."""

    def names(self) -> list[str]:
        """Only folders with files: empty ones are what looking at a name leaves."""
        prefix = f"{self.url.removeprefix('memory://').rstrip('/')}/"
        below = (name.removeprefix(prefix) for name in folder_names() if name.startswith(prefix))
        return sorted(name for name in below if _is_allowed(name))


def open_root(root: str | os.PathLike[str], *, open_store: OpenStore = open_store) -> Root:
    """The root at a path, ``file:///path`` or ``memory://name``. Nothing is touched yet.

    ``open_store`` makes the stores below it. Raises `StorageError` for any other scheme.
    """
    place = _place_of(root)
    if isinstance(place, PosixStore):
        return PosixRoot(place.url, open_store)
    if isinstance(place, MemoryStore):
        return MemoryRoot(place.url, open_store)
    raise StorageError(
        f"{place.url}: the checkpoints below a {type(place).__name__} cannot be listed; use a path, file:// "
        "or memory://",
        path=place.url,
        op="open",
    )


def _place_of(root: str | os.PathLike[str]) -> Store:
    return open_store(root)


def _is_allowed(name: str) -> bool:
    try:
        check_name(name)
    except CheckpointFormatError:
        return False
    return True
