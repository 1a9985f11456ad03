"""Open the checkpoint at a place: choose the authoritative file and the format, and suggest nearby
checkpoints.

Commit objects identify checkpoints of this package and of stock torch; formats recognize weights without a
commit. A local path to a file is that file. A URL is tried as a file only if its last part has a suffix of
`file_suffixes`, because a request is needed; a folder may have such a name too. In a folder, a commit has
precedence over weights. Torch-free.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME, RANK_LOCAL
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.format import BEGIN_BYTES, Format, found
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import MAX_MANIFEST_BYTES, decode_manifest
from dcp.storage.formats.registry import by_precedence, file_suffixes, format_of, formats
from dcp.storage.formats.torch.metadata_reader import decode_torch_metadata
from dcp.storage.formats.torch.metadata_writer import torch_metadata_head
from dcp.storage.formats.views import join_indexes
from dcp.storage.near_names import close_to, listed
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import Store, place_text
from dcp.storage.stores.opening import ParentFolder, open_parent_folder
from dcp.storage.stores.posix.files import broken_link, storage_error
from dcp.storage.threads import WorkerThreads, result_of

_LOOKED_AT: Final = 200
"""Maximum number of folders searched for checkpoints."""

_REQUESTS: Final = 4
"""Maximum number of folders searched if each needs requests."""

_SHOWN: Final = 4
_FOLDER: Final = re.compile(r"[^:]+://[^/]+/?[^/]")
"""Pattern of URLs with more than a scheme."""


@contextmanager
def naming_near_places(checkpoint_id: str | os.PathLike[str], open_store: OpenStore) -> Iterator[None]:
    """Add a hint to a CheckpointNotFoundError of this block: checkpoints below ``checkpoint_id`` or, if
    missing, its neighbors.
    """
    try:
        yield
    except CheckpointNotFoundError as error:
        raise with_near_places(error, checkpoint_id, open_store) from None


def with_near_places(
    error: CheckpointNotFoundError, checkpoint_id: str | os.PathLike[str], open_store: OpenStore
) -> CheckpointNotFoundError:
    """Return the error with the hint of `naming_near_places`."""
    try:
        text = _hint(str(error).removesuffix(" Check the path."), checkpoint_id, open_store)
    except (CheckpointError, OSError):  # keep the original error
        text = ""
    return CheckpointNotFoundError(text, **error.facts) if text else error


def _hint(message: str, checkpoint_id: str | os.PathLike[str], open_store: OpenStore) -> str:
    """Return ``message`` with a hint; "" without a hint."""
    root = open_parent_folder(checkpoint_id, open_store=open_store)
    path = root.local_path
    if path is not None and broken_link(path):
        return ""  # the message says so
    if path is not None and not os.path.lexists(path):
        return f"{root.url} holds no checkpoint: {_beside_missing(path)}"
    names = sorted(root.names(), key=_by_number, reverse=True)
    if names:
        return f"{message}\n{_below(root, names)}"
    if root.lists_tree:
        beside = _beside_prefix(root.url, open_store)
        return beside and f"{message}\n{beside}"
    names = sorted(info.name for info in open_store(checkpoint_id).list() if not info.name.startswith("."))
    files = [name for name in names if name.lower().endswith(file_suffixes())]
    return f"{message}\nFiles in it: {_some(files)}." if files else ""


def _below(root: ParentFolder, names: Sequence[str]) -> str:
    looked_at = _REQUESTS if root.lists_tree else _LOOKED_AT
    found = [name for name in names[:looked_at] if has_checkpoint(root.store(name))]
    if not found:
        return f"Folders below it: {_some(names)}; dcp ls finds the checkpoints in them."
    rest = names[len(found) :] if found == list(names[:looked_at]) else []
    return f"Checkpoints below it: {_some([*found, *rest])}."


def _beside_missing(path: Path) -> str:
    """Return a description of ``path``'s neighbors, or of the last existing parent."""
    what = "it"
    while not path.parent.is_dir():
        path = path.parent
        what = str(path)
    with os.scandir(path.parent) as entries:
        names = sorted((entry.name for entry in entries if not entry.name.startswith(".")), key=_by_number)
    close = close_to(path.name, names) or names[::-1]
    there = f"\n{path.parent} has {_some(close)}." if close else ""
    return f"{what} does not exist.{there}"


def _beside_prefix(url: str, open_store: OpenStore) -> str:
    parent, _, name = url.rpartition("/")
    names = open_parent_folder(parent, open_store=open_store).names() if _FOLDER.match(parent) else []
    close = close_to(name, names) or sorted(names, key=_by_number, reverse=True)
    return f"{parent} has {_some(close)}." if close else ""


def _some(names: Sequence[str]) -> str:
    return listed(names, most=_SHOWN, show=str)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key that puts step-2 before step-10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"([0-9]+)", name)]


logger = logging.getLogger(__name__)

T = TypeVar("T")
_P = ParamSpec("_P")

MAX_TORCH_METADATA_BYTES: Final = 8 << 30

_ATTEMPTS: Final = 8
_PROBED_NAMES: Final = 16
_LARGE_CHUNKS: Final = 50_000
"""Number of chunks from which `.metadata` has about ten megabytes."""
_START_BYTES: Final = 128 << 10
"""First bytes of `.metadata` to read: the whole of small files, and the save id of large ones."""
_OUR_DATA_FILE: Final = re.compile(rb"__[0-9]+_[0-9]+\.[0-9a-f]{8}\.distcp")
_STOCK_DATA_FILE: Final = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def open_index(store: Store, *, rank: int | None = None, own_rank: int | None = None) -> CheckpointIndex:
    """Return the index of the checkpoint committed in ``store``.

    The manifest has precedence, unless stock torch overwrote the folder (then `.metadata`). Without a
    manifest, use `.metadata`, then checkpoints of single ranks: of ``rank`` if given and present, or all
    joined, with ``own_rank`` first.

    Raises:
        CheckpointNotFoundError: If nothing is committed.
        CheckpointError: Errors of the decoders, with ``path``. A damaged manifest is never replaced by
            another file.
    """
    index = _open_pair(store, MANIFEST_NAME, METADATA_NAME)
    if index is not None:
        return index
    ranks = _local_ranks(store)
    if rank in ranks:
        ranks = [rank]
    # Several requests at a time: there may be a thousand ranks.
    threads = max(1, min(store.read_profile.threads or 1, len(ranks)))
    with WorkerThreads(threads) as pool:
        parts = pool.map(
            lambda local: _open_pair(store, f"__{local}.{MANIFEST_NAME}", f"__{local}{METADATA_NAME}"), ranks
        )
        indexes = {local: part for local, part in zip(ranks, parts, strict=True) if part is not None}
    if not indexes:
        raise _not_found(store)
    with _located(store.url):
        return join_indexes(indexes, own_rank=own_rank)


def has_checkpoint(store: Store) -> bool:
    """Return True if ``store`` has a commit, without opening files."""
    if store.stat(MANIFEST_NAME) is not None or store.stat(METADATA_NAME) is not None:
        return True
    return bool(_local_ranks(store))


def saved_by_rank(store: Store) -> bool:
    """Return True if ``store`` has only checkpoints of single ranks (``use_collectives=False``)."""
    together = store.stat(MANIFEST_NAME) or store.stat(METADATA_NAME)
    return together is None and bool(_local_ranks(store))


def _open_pair(store: Store, manifest_name: str, metadata_name: str) -> CheckpointIndex | None:
    """Return the index of a manifest and its `.metadata`; None if both are absent."""
    for _ in range(_ATTEMPTS):
        manifest, index, start = _read_pair(store, manifest_name, metadata_name)
        if manifest is None or index is None:
            metadata = _whole(store, metadata_name, start)
            if metadata is None:
                return None
            # Our save writes the manifest first, possibly between both reads.
            if _OUR_DATA_FILE.search(metadata):
                if store.stat(manifest_name) is not None:
                    continue
                logger.warning(
                    "%s is missing from a checkpoint of dcp: only %s is read, without key types (keys become "
                    "strings), empty dicts, digests, user metadata and provenance. Restore the manifest from "
                    "a copy, or load the checkpoint and save it again",
                    store.path_of(manifest_name),
                    metadata_name,
                )
            with _located(store.path_of(metadata_name)):
                return decode_torch_metadata(metadata)
        if start is None:
            return index
        if _is_long_start_of(index, start):
            return index
        metadata = _whole(store, metadata_name, start)
        published = index.torch_metadata_crc, index.replaced_torch_metadata_crc
        if metadata is None or crc32(metadata) in published:
            return index
        # Our save replaces two files, one after the other. If the manifest is unchanged, .metadata comes
        # from another writer or is damaged.
        if _unless_missing(store.read, manifest_name, limit_bytes=MAX_MANIFEST_BYTES) != manifest:
            continue
        if _is_ours(index, metadata):
            logger.warning(
                "%s differs from the file committed with the manifest: it is damaged. dcp reads the "
                "manifest instead, but stock torch would read the damaged file. Save again, or restore the "
                "file from a copy",
                store.path_of(metadata_name),
            )
            return index
        with _located(store.path_of(metadata_name)):
            return decode_torch_metadata(metadata)
    raise CheckpointConflictError(
        f"{store.url} was replaced {_ATTEMPTS} times while it was opened; give each save its own id",
        path=store.url,
    )


_Start = tuple[bytes, int]
"""First bytes and size of a file."""


def _read_pair(
    store: Store, manifest_name: str, metadata_name: str
) -> tuple[bytes | None, CheckpointIndex | None, _Start | None]:
    """Return (manifest, decoded manifest, start of `.metadata`), None for absent files.

    Requests run in parallel; a mismatch of both files means a concurrent change and needs another read.
    """
    index, read_start = None, partial(_unless_missing, store.read_start, metadata_name, _START_BYTES)
    with ExitStack() as stack:
        is_beside = store.read_profile.scatter
        beside = stack.enter_context(WorkerThreads(1)).submit(read_start) if is_beside else None
        manifest = _unless_missing(store.read, manifest_name, limit_bytes=MAX_MANIFEST_BYTES)
        if manifest is not None:
            with _located(store.path_of(manifest_name)):
                index = decode_manifest(manifest)
        return manifest, index, read_start() if beside is None else result_of(beside)


def _whole(store: Store, name: str, start: _Start | None) -> bytes | None:
    """Return the whole file of ``start``; None if absent."""
    if start is None or len(start[0]) == start[1]:
        return None if start is None else start[0]
    return _unless_missing(store.read, name, limit_bytes=MAX_TORCH_METADATA_BYTES)


def _is_long_start_of(index: CheckpointIndex, start: _Start) -> bool:
    """Return True if the start of a longer `.metadata` names the save of ``index``.

    The manifest is then authoritative, and the rest of the file is not read.
    """
    (data, size_bytes), save_id = start, index.provenance.get("save_id")
    if len(data) == size_bytes or index.torch_metadata_crc is None or not isinstance(save_id, str):
        return False
    return data.startswith(torch_metadata_head(save_id, size_bytes))


def is_large_metadata_of(store: Store, name: str, index: CheckpointIndex) -> bool:
    """Return True if `.metadata` is large and its first bytes name the save of ``index``.

    The manifest is then authoritative, and the rest of the file is not read. Small files are read whole.
    """
    if index.chunk_count < _LARGE_CHUNKS:
        return False
    start = _unless_missing(store.read_start, name, _START_BYTES)
    return start is not None and _is_long_start_of(index, start)


def _is_ours(index: CheckpointIndex, metadata: bytes) -> bool:
    """Return True if ``metadata`` was written by this package, although its CRC matches no commit.

    Stock knows neither the save id nor our file names. After a crash during a commit, the file belongs to
    the previous save.
    """
    marks = [name for name in index.files[:_PROBED_NAMES] if not _STOCK_DATA_FILE.fullmatch(name)]
    save_id = index.provenance.get("save_id")
    if isinstance(save_id, str) and save_id:
        marks.append(save_id)
    named = any(mark.encode("utf-8", "surrogatepass") in metadata for mark in marks)
    return named or _OUR_DATA_FILE.search(metadata) is not None


def _unless_missing(read: Callable[_P, T], *args: _P.args, **named: _P.kwargs) -> T | None:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return read(*args, **named)
        except CheckpointNotFoundError:
            return None
        except CorruptCheckpointError:  # replaced between two requests: read the new file
            if attempt == _ATTEMPTS:
                raise
    return None


def _local_ranks(store: Store) -> list[int]:
    matches = (RANK_LOCAL.fullmatch(info.name) for info in store.list())
    return sorted({int(match[1]) for match in matches if match})


@contextmanager
def _located(path: str) -> Iterator[None]:
    """Add ``path`` to decoder errors."""
    try:
        yield
    except CheckpointError as error:
        if error.facts.get("path"):
            raise
        raise type(error)(f"{path}: {error}", **(error.facts | {"path": path})) from error


def _not_found(store: Store) -> CheckpointNotFoundError:
    data_files = [info.name for info in store.list() if info.name.endswith(DATA_SUFFIX)]
    looked_for = f"{MANIFEST_NAME} or {METADATA_NAME}"
    if data_files:
        return CheckpointNotFoundError(
            f"{store.url} holds no committed checkpoint: there are {len(data_files)} data files, such as "
            f"{data_files[0]}, but no {looked_for}. The save that wrote them failed or is still running; "
            "load an earlier checkpoint.",
            path=store.url,
            data_files=len(data_files),
        )
    return CheckpointNotFoundError(
        f"{store.url} holds no checkpoint: no {looked_for} found. Check the path.",
        path=store.url,
        data_files=0,
    )


_FILE_URL: Final = re.compile(r"file://", re.IGNORECASE)
_REMOTE_FILE: Final = re.compile(r"(?P<folder>[A-Za-z][A-Za-z0-9+.\-]*://.*[^/])/+(?P<name>[^/]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Folder or, with ``file``, a file in the folder."""

    store: Store
    file: str | None = None

    @property
    def url(self) -> str:
        """Name in messages."""
        return self.store.url if self.file is None else self.store.path_of(self.file)


@dataclass(frozen=True, slots=True)
class Source:
    """Checkpoint source: ``index`` names files of ``store``; ``name`` is for messages, ``file`` is set for
    a single file. ``members`` are the sources of a joined checkpoint.
    """

    store: Store
    index: CheckpointIndex
    name: str
    file: str | None = None
    members: tuple[Source, ...] = ()


def locate(checkpoint_id: str | os.PathLike[str], *, open_store: OpenStore = open_store) -> SourcePlace:
    """Return the folder or file of a checkpoint id, which need not contain a checkpoint.

    Links to files are followed. Raises the errors of ``open_store`` and, for URLs that may be files, of the
    store.
    """
    text = place_text(checkpoint_id)
    is_file_url = _FILE_URL.match(text) is not None
    if is_file_url or "://" not in text:
        path = Path(unquote(urlsplit(text).path) if is_file_url else text)
        try:
            is_file = not text.endswith("/") and path.is_file()
        except OSError as error:
            raise storage_error(error, "stat", path) from error
        if not is_file:
            return SourcePlace(open_store(checkpoint_id))
        real = path.resolve()
        return SourcePlace(open_store(real.parent), real.name)
    match = _REMOTE_FILE.fullmatch(text)
    if match is not None and match["name"].lower().endswith(file_suffixes()):
        folder = open_store(match["folder"])
        if folder.stat(match["name"]) is not None:
            return SourcePlace(folder, match["name"])
    return SourcePlace(open_store(checkpoint_id))


def index_at(place: SourcePlace, *, rank: int | None = None, own_rank: int | None = None) -> CheckpointIndex:
    """Return the index at ``place``; ``rank`` and ``own_rank`` as in
    `dcp.storage.formats.opening.open_index`.

    Raises:
        CheckpointNotFoundError: If neither a commit nor weights exist.
        CheckpointError: Errors of the formats.
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
    """Raise CheckpointNotFoundError if weights of a local folder are links, which stores do not follow, or
    the folder is a dangling link.
    """
    folder = Path(place.store.url)
    fault = broken_link(folder) if place.store.capabilities.is_local else None
    if fault is not None:
        raise CheckpointNotFoundError(f"{folder} holds no checkpoint: {fault}", path=str(folder))
    links = [path.name for path in folder.glob("*") if path.is_symlink()] if folder.is_dir() else []
    if any(name.endswith(file_suffixes()) for name in links):
        raise CheckpointNotFoundError(
            f"{folder}: the weight files are symbolic links, as in the cache of a model hub. Links are not "
            "followed, because they could point at any file. If you trust the folder: dcp.load(..., "
            "storage_reader=dcp.FileSystemReader(folder, "
            "open_store=functools.partial(dcp.storage.stores.PosixStore, follow_links=True)))",
            path=str(folder),
        )


def index_of_file(store: Store, name: str) -> CheckpointIndex:
    """Return the index of a file of ``store``, by the format of its name or first bytes.

    Raises:
        CheckpointNotFoundError: If the file is absent.
    """
    with store.open_read(name) as handle:
        if name.endswith(DATA_SUFFIX):
            raise CheckpointNotFoundError(
                f"{store.path_of(name)} is a data file of a checkpoint: pass its folder, {store.url}",
                path=store.path_of(name),
            )
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
    return next(meant)  # later formats are not asked: those of other packages may fail


@contextmanager
def _read_as(one: Format, path: str) -> Iterator[None]:
    """Add ``path`` to errors, also of readers of other packages."""
    try:
        with _located(path):
            yield
    except CheckpointError:
        raise
    except Exception as error:
        raise UnsupportedFormatError(
            f"{path} cannot be read as a {one.name!r} checkpoint: {type(error).__name__}: {error}",
            path=path,
        ) from error


def _checked(index: CheckpointIndex) -> CheckpointIndex:
    if not isinstance(index, CheckpointIndex):
        raise UnsupportedFormatError(
            f"the format's reader returned a {type(index).__name__}, not a CheckpointIndex: fix its package"
        )
    return index


def index_of_folder(store: Store) -> CheckpointIndex | None:
    """Return the index of the weights in a folder; None without weights.

    Raises:
        CorruptCheckpointError: If files or tensors are missing.
        CheckpointFormatError: For names outside of the folder, and duplicate names.
    """
    for one in by_precedence(formats()):
        if one.read_folder is not None:
            with _read_as(one, store.url):
                index = found(one.read_folder)(store)
                if index is not None:
                    return _checked(index)
    return None


def complete_index(store: Store, index: CheckpointIndex) -> CheckpointIndex:
    """Return ``index`` with objects of its format that need more reading.

    Raises:
        CheckpointFormatError: If these are malformed.
    """
    one = format_of(index.format)
    if one is None or one.complete is None:
        return index
    with _read_as(one, store.url):
        return _checked(found(one.complete)(store, index))


def open_source(
    checkpoint_id: str | os.PathLike[str], *, open_store: OpenStore = open_store, rank: int | None = None
) -> Source:
    """Return `locate` and `index_at` combined."""
    with naming_near_places(checkpoint_id, open_store):
        place = locate(checkpoint_id, open_store=open_store)
        index = index_at(place, rank=rank)
    return Source(place.store, index, place.url, place.file)
