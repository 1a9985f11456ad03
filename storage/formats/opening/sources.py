"""Open checkpoints of any format: folders with a commit, folders of weights, single files.

A local path that is a file is that file. A URL is tried as a file only if its last part ends as names of such
files do (`file_suffixes`), because that costs a request; a folder may have such a name, too. In a folder a
commit of dcp or stock torch comes before weights that lie there as well. Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    UnsupportedFormatError,
)
from dcp.storage.formats.format import BEGIN_BYTES, Format, found
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.formats.opening.places_near import naming_near_places
from dcp.storage.formats.registry import by_precedence, file_suffixes, format_of, formats
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import Store, place_text
from dcp.storage.stores.posix.files import broken_link, storage_error

__all__ = [
    "Source",
    "SourcePlace",
    "complete_index",
    "index_at",
    "index_of_file",
    "index_of_folder",
    "locate",
    "open_source",
]

_FILE_URL: Final = re.compile(r"file://", re.IGNORECASE)
_REMOTE_FILE: Final = re.compile(r"(?P<folder>[A-Za-z][A-Za-z0-9+.\-]*://.*[^/])/+(?P<name>[^/]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A folder, or with ``file`` one file in it."""

    store: Store
    file: str | None = None

    @property
    def url(self) -> str:
        """Names it in messages."""
        return self.store.url if self.file is None else self.store.path_of(self.file)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint: ``index`` names files of ``store``; ``name`` names the whole in messages, ``file`` is set
    if it is that one file."""

    store: Store
    index: CheckpointIndex
    name: str
    file: str | None = None


def locate(checkpoint_id: str | os.PathLike[str], *, open_store: OpenStore = open_store) -> SourcePlace:
    """Return the folder or file of a checkpoint id; that something is in it is not known yet.

    A link to a file is followed, since the caller named it. Raises what ``open_store`` raises and, for a URL
    that could be a file, what asking its store does.
    """
    text = place_text(checkpoint_id)
    is_file_url = _FILE_URL.match(text) is not None
    if is_file_url or "://" not in text:
        path = Path(unquote(urlsplit(text).path) if is_file_url else text)
        if text.endswith("/") or not _is_file(path):
            return SourcePlace(open_store(checkpoint_id))
        real = path.resolve()
        return SourcePlace(open_store(real.parent), real.name)
    match = _REMOTE_FILE.fullmatch(text)
    if match is not None and match["name"].lower().endswith(file_suffixes()):
        folder = open_store(match["folder"])
        if folder.stat(match["name"]) is not None:
            return SourcePlace(folder, match["name"])
    return SourcePlace(open_store(checkpoint_id))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise storage_error(error, "stat", path) from error


def index_at(place: SourcePlace, *, rank: int | None = None, own_rank: int | None = None) -> CheckpointIndex:
    """Return the index of what is at ``place``; ``rank`` and ``own_rank`` as in
    `dcp.storage.formats.opening.folder.open_index`.

    Raises CheckpointNotFoundError where there is neither a commit nor a file of weights, and the formats'
    errors.
    """
    if place.file is not None:
        return index_of_file(place.store, place.file)
    try:
        return open_index(place.store, rank=rank, own_rank=own_rank)
    except CheckpointNotFoundError:
        index = index_of_folder(place.store)
        if index is None:
            _explain_links(place)
            raise
        return index


def _explain_links(place: SourcePlace) -> None:
    """Raise CheckpointNotFoundError if a local folder has weights as links, which stores do not follow, or is
    itself a link that leads nowhere."""
    folder = Path(place.store.url)
    fault = broken_link(folder) if place.store.capabilities.is_local else None
    if fault is not None:
        raise CheckpointNotFoundError(f"{fault}: there is no checkpoint", path=str(folder))
    links = [path.name for path in folder.glob("*") if path.is_symlink()] if folder.is_dir() else []
    if any(name.endswith(file_suffixes()) for name in links):
        raise CheckpointNotFoundError(
            f"{folder}: its weights are symbolic links, as in the cache of a model hub, and could point at "
            "any file of yours. If you trust the folder: dcp.load(..., storage_reader=dcp.FileSystemReader("
            "folder, open_store=functools.partial(dcp.storage.stores.PosixStore, follow_links=True)))",
            path=str(folder),
        )


def index_of_file(store: Store, name: str) -> CheckpointIndex:
    """Return the index of one file of ``store``, of the format that its name or how it begins says.

    Raises CheckpointNotFoundError if it is absent.
    """
    with store.open_read(name) as handle:
        one = _format_of_file(name, handle.pread(min(BEGIN_BYTES, handle.size_bytes), 0))
        with _read_as(one, store.path_of(name)):
            read_file = found(one.read_file or "")
            return _checked(read_file(lambda at, count: handle.pread(count, at), handle.size_bytes, name))


def _format_of_file(name: str, begin: bytes) -> Format:
    of_files = [one for one in by_precedence(formats()) if one.read_file is not None]
    meant = chain(
        (one for one in of_files if one.names_suffice and one.has_suffix(name)),
        (one for one in of_files if one.begins_so(begin)),
        (one for one in of_files if one.takes_the_rest),
    )
    return next(meant)  # no more are asked: another package's may fail


@contextmanager
def _read_as(one: Format, path: str) -> Iterator[None]:
    """Errors within name ``path``. Readers of other packages' formats may raise anything."""
    try:
        yield
    except CheckpointFormatError as error:
        if error.path:
            raise
        raise type(error)(f"{path}: {error}", **(error.facts | {"path": path})) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise UnsupportedFormatError(
            f"{path} cannot be read as a {one.name!r} checkpoint: {type(error).__name__}: {error}",
            path=path,
        ) from error


def _checked(index: CheckpointIndex) -> CheckpointIndex:
    if not isinstance(index, CheckpointIndex):
        raise UnsupportedFormatError(f"what reads its format gave a {type(index).__name__}, and no index")
    return index


def index_of_folder(store: Store) -> CheckpointIndex | None:
    """Return the index of the files in a folder that are one checkpoint together; None if there are none.

    Raises what the formats raise: CorruptCheckpointError where files or tensors are missing,
    CheckpointFormatError for names that reach outside the folder, and for names that stand twice.
    """
    for one in by_precedence(formats()):
        if one.read_folder is not None:
            with _read_as(one, store.url):
                index = found(one.read_folder)(store)
                if index is not None:
                    return _checked(index)
    return None


def complete_index(store: Store, index: CheckpointIndex) -> CheckpointIndex:
    """Return ``index`` with what its format has besides tensors, where that takes more than reading the
    index.

    Raises CheckpointFormatError where that is malformed.
    """
    one = format_of(index.format)
    if one is None or one.complete is None:
        return index
    with _read_as(one, store.url):
        return _checked(found(one.complete)(store, index))


def open_source(
    checkpoint_id: str | os.PathLike[str], *, open_store: OpenStore = open_store, rank: int | None = None
) -> Source:
    """`locate` and `index_at` together."""
    with naming_near_places(checkpoint_id, open_store):
        place = locate(checkpoint_id, open_store=open_store)
        index = index_at(place, rank=rank)
    return Source(place.store, index, place.url, place.file)
