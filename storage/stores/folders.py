"""The places below a root: the folders of a training run's checkpoints, found without opening each of them.

A `Store` is one flat folder. A `ParentFolder` is what has many of them directly below it, and answers which
there are and which of them are committed with as few requests as its store allows.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME, is_commit_object
from dcp.storage.errors import StorageError
from dcp.storage.stores import OpenStore
from dcp.storage.stores import open_store as open_plainly
from dcp.storage.stores.base import FileInfo, Store
from dcp.storage.stores.names import check_name, is_name

__all__ = ["ParentFolder", "SmallFiles", "open_parent_folder"]

SmallFiles = dict[str, FileInfo]
"""Small files of one folder by name; what else is in the folder was not looked at."""

_REQUESTS_AT_ONCE: Final = 16


class ParentFolder:
    """A place with stores directly below it. Errors are those of `Store`.

    ``place`` is the store of the root itself, which lists folders; ``open_store`` makes those below. Where
    the place lists all that is below it at once, whatever is asked about all folders is answered from one
    such listing, and what is asked about one from a listing of that one.
    """

    def __init__(self, place: Store, open_store: OpenStore) -> None:
        self.place = place
        self.url = place.url
        """Names the place in messages; that of a folder is ``url/name``."""
        self._open_store = open_store

    @property
    def local_path(self) -> Path | None:
        """Return where it is on this machine; None for any other place."""
        return Path(self.url) if self.place.capabilities.is_local else None

    @property
    def lists_tree(self) -> bool:
        """Return whether a request costs more than what it brings: folders are better asked for all at
        once."""
        return self.place.capabilities.lists_tree

    @property
    def at_once(self) -> int:
        """Return how many small files below are worth reading at a time: 1 where a request costs next to
        nothing."""
        return _REQUESTS_AT_ONCE if self.lists_tree else 1

    def exists(self) -> bool:
        """Return whether the place is there. Kinds without folders, which have nothing to make, say yes."""
        return self.place.exists()

    def names(self) -> list[str]:
        """Return the names of the folders directly below that could be checkpoints, sorted: one listing.

        None of them is opened. ``[]`` if the place does not exist.
        """
        return sorted(name for name in self.place.folders() if is_name(name))

    def store(self, name: str) -> Store:
        """Return the folder ``name`` as a store; nothing is touched. Raises `CheckpointFormatError` for a
        path."""
        return self._open_store(f"{self.url.rstrip('/')}/{check_name(name)}")

    def listings(self) -> dict[str, list[FileInfo] | None]:
        """Return the folders of `names`, each with all its files, sorted, where the one listing that this
        costs tells them (then only those with files); else with None."""
        if not self.lists_tree:
            return dict.fromkeys(self.names())
        return {name: sorted(files.values(), key=lambda info: info.name) for name, files in self._walk()}

    def look(self, also: Collection[str] = ()) -> dict[str, SmallFiles]:
        """Return every folder with the commit objects in it, and with those of the files ``also`` that are
        there.

        Costs one listing and a request for each file asked for, where that listing does not tell them; no
        file is read. A folder that vanishes meanwhile is listed as empty.
        """
        if not self.lists_tree:
            return {name: self.look_into(name, also) for name in self.names()}
        return {name: _wanted(files.values(), also) for name, files in self._walk()}

    def look_into(self, name: str, also: Collection[str] = ()) -> SmallFiles:
        """Return one folder, as `look`; empty if it is not there."""
        store = self.store(name)
        if self.lists_tree:
            return _wanted(store.list(), also)
        usual = (MANIFEST_NAME, METADATA_NAME, *also)
        found = {name: info for name in usual if (info := store.stat(name)) is not None}
        if not any(map(is_commit_object, found)):  # a save by single ranks, or none
            found |= _wanted(store.list(), ())
        return found

    def _walk(self) -> list[tuple[str, SmallFiles]]:
        folders: dict[str, SmallFiles] = {}
        for name, info in self.place.walk():
            if is_name(name) and is_name(info.name):
                folders.setdefault(name, {})[info.name] = info
        return sorted(folders.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def _wanted(files: Collection[FileInfo], also: Collection[str]) -> SmallFiles:
    return {info.name: info for info in files if is_commit_object(info.name) or info.name in also}


def open_parent_folder(root: str | os.PathLike[str], *, open_store: OpenStore = open_plainly) -> ParentFolder:
    """Return the root at a path or URL: whatever `dcp.storage.stores.open_store` opens and lists folders of.
    Nothing is touched yet.

    ``open_store`` makes the stores below it; for a root with storage options it is
    `dcp.storage.stores.opening.OpenWith`. Raises `StorageError` for a scheme that is not known.
    """
    # The second time because a store that is wrapped by another cannot be asked what is below it.
    for opener in (open_store, open_plainly):
        place = opener(root)
        if place.capabilities.lists_folders:
            return ParentFolder(place, open_store)
    raise StorageError(
        f"{place.url}: the checkpoints below a {type(place).__name__} cannot be listed",
        path=place.url,
        op="open",
    )
