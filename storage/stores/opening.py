"""Store selection: open the store of a path or URL, and list the folders of a run.

Built-in kinds are declared by `STORE_TYPE` of each module. Others register by `register_store` or by the
entry point group `dcphub.stores`, with an entry per scheme, loaded on first use of an unknown scheme. All
remaining schemes go to fsspec. `ParentFolder` finds folders below a place without opening each folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME, is_commit_object
from dcp.storage.errors import OptionError, StorageError
from dcp.storage.extensions import loaded_extension
from dcp.storage.stores.base import FileInfo, Store, StoreType, check_name, is_name, place_text
from dcp.storage.stores.memory import STORE_TYPE as MEMORY
from dcp.storage.stores.objects import STORE_TYPE as OBJECTS
from dcp.storage.stores.posix.store import STORE_TYPE as POSIX

OpenStore: TypeAlias = Callable[[str | os.PathLike[str]], Store]
"""Factory of the store of a checkpoint id, like `open_store`."""

_GROUP: Final = "dcphub.stores"

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.\-]*")
_BY_SCHEME: Final[dict[str, StoreType]] = {
    scheme: store_type for store_type in (POSIX, MEMORY, OBJECTS) for scheme in store_type.schemes
}
_OURS: Final = frozenset(_BY_SCHEME)

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
_MEMORY: Final = re.compile(r"memory://", re.IGNORECASE)
_LOCAL: Final = re.compile(r"file://|(?!.*://)", re.IGNORECASE | re.DOTALL)
_MOOT_LOCALLY: Final = frozenset({"auto_mkdir"})
"""Options of fsspec's local file system without effect on a local store."""


def open_store(
    checkpoint_id: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Store:
    """Open the store of a checkpoint.

    No file is touched. A missing package is reported by the first operation.

    Args:
        checkpoint_id: Path, ``file:///path``, ``memory://name`` (this process only),
            ``s3://bucket/prefix``, or another fsspec URL.
        storage_options: Options of the fsspec file system and of
            `dcp.storage.stores.objects.store.ObjectOptions`.

    Returns:
        The store.

    Raises:
        StorageError: For an invalid place, an unknown scheme, or options for a store without options.

    Examples:
        store = open_store("s3://bucket/run/step-00000100", {"concurrency": 32})
        names = [file.name for file in store.list()]
    """
    text = place_text(checkpoint_id)
    store_type = type_of_place(text)
    if storage_options and not store_type.takes_options:
        raise StorageError(
            f"{text!r} takes no storage options: remove {', '.join(sorted(storage_options))}",
            path=text,
            op="open",
        )
    return store_type.open(text, storage_options)


def type_of_place(place: str) -> StoreType:
    """Return the kind of store of a path or URL.

    Raises:
        StorageError: If ``place`` is not a path or URL.
    """
    url = _URL.fullmatch(place)
    if url is None and ":" in place:
        _refuse_mangled(place)
    scheme = url[1].lower() if url is not None else "file"
    return _BY_SCHEME[scheme] if scheme in _BY_SCHEME else _type_of_package(scheme)


def _refuse_mangled(text: str) -> None:
    """Raise StorageError for a path that was mangled from a URL, instead of creating a folder named like
    the scheme.
    """
    # pathlib merges the two slashes of a URL
    schemes = "|".join(map(re.escape, sorted(_BY_SCHEME)))
    mangled = re.fullmatch(rf"(?:.*/)?({schemes}):(/.*)?", text, re.DOTALL | re.IGNORECASE)
    if mangled is not None:
        slashes = "///" if mangled[1].lower() == "file" else "//"
        meant = f"{mangled[1]}:{slashes}{(mangled[2] or '').lstrip('/')}"
        raise StorageError(
            f"{text!r} is a URL that lost a slash, as with pathlib.Path or os.path.normpath: pass "
            f"{meant!r} as a string",
            path=text,
            op="open",
        )
    if "://" in text:
        raise StorageError(
            f"{text!r}: chained URLs and prefixes before the scheme are not supported",
            path=text,
            op="open",
        )


def register_store(store_type: StoreType) -> None:
    """Register a kind of store for the URLs of ``store_type.schemes`` in this process. The last
    registration wins.

    Raises:
        OptionError: If the argument is not a `StoreType`.
        StorageError: For built-in schemes, no schemes, or schemes that are not a tuple.
    """
    if not isinstance(store_type, StoreType):
        raise OptionError(
            f"register_store() needs a StoreType, not a {type(store_type).__name__}: {store_type!r:.200}"
        )
    schemes = store_type.schemes
    if not isinstance(schemes, tuple) or not schemes:
        raise StorageError(
            f"schemes of a StoreType must be a tuple of strings, such as ('zip',), not {schemes!r}",
            op="register",
        )
    for scheme in schemes:
        if not isinstance(scheme, str) or scheme in _OURS or not _SCHEME.fullmatch(scheme):
            raise StorageError(
                f"a store cannot be registered for the scheme {scheme!r}, which is built in or not a "
                "lower-case URL scheme",
                op="register",
            )
    _BY_SCHEME.update(dict.fromkeys(store_type.schemes, store_type))


def _type_of_package(scheme: str) -> StoreType:
    """Return the kind of store of another package for a scheme, or the fsspec store."""
    found = loaded_extension(_GROUP, scheme)
    if found is not None and not (isinstance(found, StoreType) and scheme in found.schemes):
        raise StorageError(
            f"the entry point {scheme} of the group {_GROUP} must be a StoreType for the scheme {scheme!r}, "
            f"not {found!r:.200}: fix or uninstall its package",
            op="open",
        )
    _BY_SCHEME[scheme] = OBJECTS if found is None else found
    return _BY_SCHEME[scheme]


class OpenWith:
    """Picklable store factory: `dcp.storage.stores.open_store` with fixed ``storage_options``.

    Options are compared by value; the repr shows only their names, because values may be credentials. With
    ``through_fsspec``, ``memory://`` is fsspec's file system, as for
    `torch.distributed.checkpoint.FsspecReader`, not `MemoryStore`.
    """

    def __init__(
        self, storage_options: Mapping[str, Any] | None = None, *, through_fsspec: bool = False
    ) -> None:
        if storage_options is not None:
            check_storage_options(storage_options)
        self.storage_options: dict[str, Any] = dict(storage_options or {})
        self.through_fsspec = through_fsspec

    def __call__(self, checkpoint_id: str | os.PathLike[str]) -> Store:
        """Open the store of a path or URL. Raises the errors of `open_store`."""
        options, text = self.storage_options, place_text(checkpoint_id)
        if self.through_fsspec:
            if _MEMORY.match(text):
                from dcp.storage.stores.objects.filesystem import FsspecStore

                return FsspecStore(text, options)
            if _LOCAL.match(text):
                options = {name: value for name, value in options.items() if name not in _MOOT_LOCALLY}
        return open_store(checkpoint_id, options or None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenWith) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((frozenset(self.storage_options), self.through_fsspec))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(map(str, self.storage_options)))})"


def check_storage_options(storage_options: object) -> None:
    """Raise TypeError for invalid storage options, without showing values."""
    if storage_options is None:
        return
    if not isinstance(storage_options, Mapping) or any(type(name) is not str for name in storage_options):
        raise OptionError(
            "storage_options must be a mapping of option names to values, not a "
            f"{type(storage_options).__name__}"
        )


SmallFiles = dict[str, FileInfo]
"""Small files of a folder by name."""

_REQUESTS_AT_ONCE: Final = 16


class ParentFolder:
    """Place with stores directly below, such as a run with steps. Errors are those of `Store`.

    ``place`` is the store of the root, which lists folders; ``open_store`` opens the stores below. If the
    place lists whole trees, questions about all folders use a single listing.
    """

    def __init__(self, place: Store, open_store: OpenStore) -> None:
        self.place = place
        self.url = place.url
        """URL of the place, used in messages; a folder is ``url/name``."""
        self._open_store = open_store

    @property
    def local_path(self) -> Path | None:
        """Path on this machine; None for other places."""
        return Path(self.url) if self.place.capabilities.is_local else None

    @property
    def lists_tree(self) -> bool:
        """True if requests are expensive and folders should be listed at once."""
        return self.place.capabilities.lists_tree

    @property
    def at_once(self) -> int:
        """Number of small files to read in parallel; 1 for cheap requests."""
        return _REQUESTS_AT_ONCE if self.lists_tree else 1

    def names(self) -> list[str]:
        """Return the sorted names of folders that may be checkpoints, by one listing; ``[]`` for a missing
        place.

        No folder is opened.
        """
        return sorted(name for name in self.place.folders() if is_name(name))

    def store(self, name: str) -> Store:
        """Return the folder ``name`` as a store without touching any file.

        Raises:
            CheckpointFormatError: If ``name`` is a path.
        """
        return self._open_store(f"{self.url.rstrip('/')}/{check_name(name)}")

    def listings(self) -> dict[str, list[FileInfo] | None]:
        """Return the folders of `names`, each with the sorted files if a single listing shows them (then
        without empty folders), otherwise with None.
        """
        if not self.lists_tree:
            return dict.fromkeys(self.names())
        return {name: sorted(files.values(), key=lambda info: info.name) for name, files in self._walk()}

    def look(self, also: Collection[str] = ()) -> dict[str, SmallFiles]:
        """Return every folder with its commit objects and the existing files among ``also``.

        Costs one listing, plus one request per file if the listing does not show files. No file is read. A
        folder that vanishes meanwhile appears empty.
        """
        if not self.lists_tree:
            return {name: self.look_into(name, also) for name in self.names()}
        return {name: _wanted(files.values(), also) for name, files in self._walk()}

    def look_into(self, name: str, also: Collection[str] = ()) -> SmallFiles:
        """Return one folder like `look`; empty if missing."""
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


_open_plainly: Final = open_store


def open_parent_folder(root: str | os.PathLike[str], *, open_store: OpenStore = open_store) -> ParentFolder:
    """Open the root of a run at a path or URL, without touching any file.

    Args:
        root: Path or URL of a store that lists folders.
        open_store: Factory of the stores below; for storage options use
            `dcp.storage.stores.opening.OpenWith`.

    Raises:
        StorageError: For an unknown scheme.
    """
    # The second listing is for wrapped stores, which cannot list folders.
    for opener in (open_store, _open_plainly):
        place = opener(root)
        if place.capabilities.lists_folders:
            return ParentFolder(place, open_store)
    raise StorageError(
        f"{place.url}: a {type(place).__name__} cannot list the folders below it",
        path=place.url,
        op="open",
    )
