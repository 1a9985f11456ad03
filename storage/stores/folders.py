"""The places below a root: the folders of a training run's checkpoints, found without opening each of them.

A `Store` is one flat folder. A `Root` is what has many of them directly below it, and answers which there are
and which of them are committed with as few requests as its kind allows. One kind is one class here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from dcp.storage.errors import CheckpointFormatError, StorageError
from dcp.storage.formats.native.manifest import MANIFEST_NAME, METADATA_NAME
from dcp.storage.formats.open import is_commit_object
from dcp.storage.stores import OpenStore
from dcp.storage.stores import open_store as open_plainly
from dcp.storage.stores.base import FileInfo, Store, check_name
from dcp.storage.stores.memory import MemoryStore, folder_names
from dcp.storage.stores.posix import PosixStore
from dcp.storage.stores.posix_files import storage_error

if TYPE_CHECKING:
    from dcp.storage.stores.objects.store import FsspecStore

__all__ = ["Found", "MemoryRoot", "ObjectRoot", "PosixRoot", "Root", "open_root"]

Found = dict[str, FileInfo]
"""Small files of one folder by name; what else is in the folder was not looked at."""


class Root(ABC):
    """A place with stores directly below it. Errors are those of `Store`."""

    url: str
    """Names the place in messages; that of a folder is ``url/name``."""

    at_once: int = 1
    """How many small files below are worth reading at a time: 1 where a request costs next to nothing."""

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

    def listings(self) -> dict[str, list[FileInfo] | None]:
        """The folders of `names`, each with all its files, sorted, where the one listing that this costs
        tells them; else with None."""
        return dict.fromkeys(self.names())

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


class ObjectRoot(Root):
    """Objects whose keys begin alike. Folders are the parts of keys between two slashes, and nothing to make.

    Whatever is asked about all folders is answered from one listing, a thousand objects a request, and what
    is asked about one from a listing of that one.
    """

    at_once = 16

    def __init__(self, place: FsspecStore, open_store: OpenStore) -> None:
        super().__init__(place.url, open_store)
        self._place = place

    def exists(self) -> bool:
        """Always, on S3; that there is no such bucket is an error of the first request."""
        return self._place.exists()

    def make(self) -> None:
        """Nothing, on S3."""
        self._place.make_root()

    def names(self) -> list[str]:
        """By a listing of the folders alone, whatever is in them."""
        return sorted(name for name in self._place.folders() if _is_allowed(name))

    def listings(self) -> dict[str, list[FileInfo] | None]:
        """Only folders with files directly in them; those always with their files."""
        return {name: sorted(files.values(), key=lambda info: info.name) for name, files in self._walk()}

    def look(self, also: Collection[str] = ()) -> dict[str, Found]:
        """As `Root.look`, from one listing of everything below."""
        return {
            name: {file: info for file, info in files.items() if is_commit_object(file) or file in also}
            for name, files in self._walk()
        }

    def look_into(self, name: str, also: Collection[str] = ()) -> Found:
        """As `Root.look_into`, from one listing of the folder."""
        listing = self.store(name).list()
        return {info.name: info for info in listing if is_commit_object(info.name) or info.name in also}

    def _walk(self) -> list[tuple[str, Found]]:
        folders: dict[str, Found] = {}
        for name, info in self._place.walk():
            if _is_allowed(name) and _is_allowed(info.name):
                folders.setdefault(name, {})[info.name] = info
        return sorted(folders.items())


def open_root(root: str | os.PathLike[str], *, open_store: OpenStore = open_plainly) -> Root:
    """The root at a path, ``file:///path``, ``memory://name``, ``s3://bucket/prefix``, or what else fsspec
    has a file system for. Nothing is touched yet.

    ``open_store`` makes the stores below it; for a root with storage options it is
    `dcp.storage.stores.opening.OpenWith`. Raises `StorageError` for a scheme that is not known.
    """
    # The second time because a store that somebody has wrapped cannot be asked what is below it.
    for opener in (open_store, open_plainly):
        place = opener(root)
        if isinstance(place, PosixStore):
            return PosixRoot(place.url, open_store)
        if isinstance(place, MemoryStore):
            return MemoryRoot(place.url, open_store)
        from dcp.storage.stores.objects.store import FsspecStore  # only here: most roots do without fsspec

        if isinstance(place, FsspecStore):
            return ObjectRoot(place, open_store)
    raise StorageError(
        f"{place.url}: the checkpoints below a {type(place).__name__} cannot be listed",
        path=place.url,
        op="open",
    )


def _is_allowed(name: str) -> bool:
    try:
        check_name(name)
    except CheckpointFormatError:
        return False
    return True
