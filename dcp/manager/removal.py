"""Remove one checkpoint so that a crash leaves it either loadable or deleted. Does not import torch.

1. Write a tombstone to the notes, with the id of the commit. 2. Remove the commit objects if unchanged: under
the lock, or by a conditional deletion. `.metadata` goes before the manifest, whose removal deletes the
checkpoint. (Checkpoints saved without collectives have one manifest for each rank.) 3. Remove data files,
notes and the folder.

Only data files of this commit, and uploads that began before it, are removed. Files of a newer save and of
users stay. On an object store that ignores conditional deletion, a save that commits between comparison and
deletion is lost.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from dcp.conversion.local import LEDGER_NAME, only_copies, refusal_to_put_back, remove_work_folder
from dcp.conversion.targets.job import is_written_under
from dcp.manager.dropping import OWN_ASIDE, finish_drop, owner_of
from dcp.steps import Commit, Deleting, Notes, read_commit, read_notes, update_notes
from dcp.storage.commit import abort_uploads, unfinished_uploads
from dcp.storage.commit_names import DATA_NAME, MANIFEST_NAME, METADATA_NAME, NOTES_NAME, is_commit_object
from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from dcp.storage.formats.opening import MAX_TORCH_METADATA_BYTES, open_index
from dcp.storage.formats.registry import TORCH_DCP
from dcp.storage.formats.torch.metadata_reader import decode_torch_metadata
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import LOCK_NAME, TEMPORARY_PREFIX, FileInfo, Store
from dcp.storage.stores.opening import open_parent_folder
from dcp.storage.stores.posix.store import PosixStore

logger = logging.getLogger(__name__)

Outcome = Literal["deleted", "pinned", "replaced", "absent"]

_LOCK_TIMEOUT_SECONDS: Final = 60.0
_ASIDE: Final = re.compile(
    rf"{OWN_ASIDE.pattern}|{re.escape(TEMPORARY_PREFIX)}convert-[0-9a-f]{{16}}|(?:__[0-9]+)?\.metadata\.tmp"
)
"""Temporary files of killed publishes of dcp and stock torch, and ledgers of conversions."""
_STOCK_OWNER: Final = ""
"""Owner of stock torch's data files, whose names have no save id."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Result of a removal: ``files`` and ``size_bytes`` removed, and names ``left`` in the folder.

    ``outcome`` is "deleted", "pinned", "replaced" (another save has committed) or "absent".
    """

    outcome: Outcome
    files: int = 0
    size_bytes: int = 0
    left: tuple[str, ...] = ()


def remove_checkpoint(
    store: Store, now_seconds: float, *, is_meant: Callable[[Commit], bool] | None = None
) -> Removed:
    """Remove the checkpoint in ``store``, or finish an interrupted removal.

    ``is_meant`` returns False for a commit that must stay ("replaced"). Repeat the call after any error.
    Raises errors of the store.
    """
    commit = read_commit(store)
    if commit is None:
        return finish_removal(store, now_seconds)
    if is_meant is not None and not is_meant(commit):
        return Removed("replaced")
    tombstone = _tombstone(store, commit, now_seconds)
    uploads = frozenset(unfinished_uploads(store))  # uploads of saves that began before this removal
    noted = update_notes(store, lambda notes: notes if notes.pinned else replace(notes, deleting=tombstone))
    if noted.pinned:
        return Removed("pinned")
    if not _cut(store, commit):
        update_notes(store, _unbury)
        return Removed("replaced")
    return _clear(store, tombstone, uploads)


def finish_removal(store: Store, now_seconds: float) -> Removed:
    """Finish an interrupted removal; "absent" without one, "replaced" if a save followed."""
    tombstone = _tombstone_of(store)
    commit = read_commit(store)
    if tombstone is None:
        if commit is None and not store.list():
            store.remove_root()
        return Removed("absent")
    if commit is None:
        return _clear(store, tombstone)
    if commit.save_id == tombstone.save_id:
        return remove_checkpoint(store, now_seconds)
    update_notes(store, _unbury)
    return Removed("replaced")


def abandoned_files(
    store: Store, before_seconds: float, files: Sequence[FileInfo] | None = None
) -> list[FileInfo] | None:
    """Return the files of abandoned saves in a folder without a commit, all older than ``before_seconds``;
    None for other folders.

    A folder with nothing but an old lock file returns this file: a deletion or a save was killed. ``files``
    are the folder's files if already listed.
    """
    files = store.list() if files is None else files
    if files:
        data = [info for info in files if is_left_by_a_save(info.name)]
        is_committed = any(is_commit_object(info.name) for info in files)
        if is_committed or not data or max(info.modified_seconds for info in data) >= before_seconds:
            return None
        return [*data, *(info for info in files if info.name == NOTES_NAME)]
    if not store.capabilities.is_local:
        return None
    folder = Path(store.url)
    try:
        modified_seconds, names = folder.stat().st_mtime, [path.name for path in folder.iterdir()]
    except OSError:
        return None
    if modified_seconds >= before_seconds or not {LOCK_NAME}.issuperset(names):
        return None
    return [FileInfo(name, 0, modified_seconds) for name in names]


def remove_abandoned(store: Store, before_seconds: float) -> Removed:
    """Remove `abandoned_files` under the lock.

    Where the lock does not exclude other processes, a save checks for its files before the commit.
    """
    gone = abandoned_files(store, before_seconds)
    if gone and gone[0].name != LOCK_NAME:
        with store.lock(timeout_seconds=_LOCK_TIMEOUT_SECONDS):
            gone = abandoned_files(store, before_seconds)
            _delete(store, gone or ())
        _abort_uploads(store, gone or ())
    return Removed("absent") if gone is None else _close(store, gone)


def is_left_by_a_save(name: str) -> bool:
    """Return whether a file name is one that only saves and their publishes use."""
    return (DATA_NAME.fullmatch(name) or _ASIDE.fullmatch(name)) is not None


def files_to_remove(store: Store, now_seconds: float) -> list[FileInfo]:
    """Return the files that `remove_checkpoint` would remove, without changing anything."""
    commit = read_commit(store)
    tombstone = _tombstone_of(store) if commit is None else _tombstone(store, commit, now_seconds)
    if tombstone is None:
        return []
    files = store.list()
    committed = () if commit is None else commit.versions
    return [
        info
        for info in files
        if info.name in committed or info.name == NOTES_NAME or _belongs(info, tombstone, now_seconds)
    ]


def _tombstone(store: Store, commit: Commit, now_seconds: float) -> Deleting:
    files: Sequence[str] = () if commit.index is None else commit.index.files
    if commit.index is None and METADATA_NAME in commit.versions:
        # For a damaged manifest, use the names in `.metadata`: times are not enough, because the files of a
        # fast save may have the same second as its commit objects.
        with suppress(CheckpointNotFoundError, CheckpointFormatError, CorruptCheckpointError):
            data = store.read(METADATA_NAME, limit_bytes=MAX_TORCH_METADATA_BYTES)
            files = decode_torch_metadata(data).files
    owners = {match["owner"] or _STOCK_OWNER for name in files if (match := DATA_NAME.fullmatch(name))}
    times = {info.name: info.modified_seconds for info in store.list() if info.name in commit.versions}
    together = [times[name] for name in (MANIFEST_NAME, METADATA_NAME) if name in times]
    # A save that began before the last commit to an id cannot commit any more. Ranks that save without
    # collectives do not exclude each other, so there the first commit counts.
    newest = max(together) if together else min(times.values(), default=0.0)
    return Deleting(commit.save_id, float(now_seconds), sorted(owners), float(newest))


def _tombstone_of(store: Store) -> Deleting | None:
    try:
        return read_notes(store).deleting
    except (CheckpointFormatError, CorruptCheckpointError) as error:
        logger.warning("%s; dcp gc or a later manager removes the remaining files", error)
        return None


def _unbury(notes: Notes) -> Notes:
    return replace(notes, deleting=None)


def _cut(store: Store, commit: Commit) -> bool:
    """Remove the commit objects; return False if they no longer belong to ``commit``."""
    with store.lock(timeout_seconds=_LOCK_TIMEOUT_SECONDS):
        found = {info.name for info in store.list() if is_commit_object(info.name)}
        if found != set(commit.versions):
            return False
        if any(store.version(name) != version for name, version in commit.versions.items()):
            return False
        names = list(commit.versions)  # the manifest last
        stock_is_truth = commit.index is not None and commit.index.format == TORCH_DCP.name
        if stock_is_truth and names[:2] == [MANIFEST_NAME, METADATA_NAME]:
            names[:2] = [METADATA_NAME, MANIFEST_NAME]
        for name in names[::-1]:
            if not store.delete_if(name, commit.versions[name]):
                return False
    # Sync before removing data: a power failure must not restore the commit objects.
    store.sync()
    return True


def _clear(store: Store, tombstone: Deleting, uploads: Collection[str] = ()) -> Removed:
    files = store.list()
    # A killed publish of the tombstone may have left a temporary file as new as the notes.
    noted_seconds = max((info.modified_seconds for info in files if info.name == NOTES_NAME), default=0.0)
    gone = [info for info in files if _belongs(info, tombstone, noted_seconds)]
    _delete(store, gone)
    _abort_uploads(store, (), tombstone.owners, uploads)
    with store.lock(timeout_seconds=_LOCK_TIMEOUT_SECONDS):
        notes = store.version(NOTES_NAME)
        committed = any(is_commit_object(info.name) for info in store.list())
        if not committed and notes is not None:
            store.delete_if(NOTES_NAME, notes)
    if committed:  # another save has committed; keep its notes
        update_notes(store, _unbury)
    return _close(store, gone)


def _belongs(info: FileInfo, tombstone: Deleting, noted_seconds: float) -> bool:
    data = DATA_NAME.fullmatch(info.name)
    if data is not None:
        is_own = (data["owner"] or _STOCK_OWNER) in tombstone.owners
        # Exclude equal times: with clocks in seconds, such a file may belong to a newer save.
        return is_own or info.modified_seconds < tombstone.newest
    return _ASIDE.fullmatch(info.name) is not None and info.modified_seconds <= noted_seconds


def _delete(store: Store, files: Iterable[FileInfo]) -> None:
    failed = store.delete_all([info.name for info in files])
    for error in failed.values():
        raise error


def _abort_uploads(
    store: Store, gone: Iterable[FileInfo], of_saves: Iterable[str] = (), names: Collection[str] = ()
) -> None:
    """Abort uploads of saves and conversions with files in ``gone``, of the saves ``of_saves``, and of files
    ``names``.
    """
    owners: set[str | None] = {*of_saves, *(owner_of(info.name) for info in gone)} - {None}
    ledgers = {info.name for info in gone if info.name.startswith(TEMPORARY_PREFIX)}
    if owners or names or ledgers:
        abort_uploads(
            store,
            lambda name: name in names or owner_of(name) in owners or is_written_under(ledgers, name),
        )


def _close(store: Store, gone: list[FileInfo]) -> Removed:
    store.remove_root()
    left = tuple(info.name for info in store.list())
    if left:
        logger.info("%s: %d files kept that are not part of the deleted checkpoint", store.url, len(left))
    return Removed("deleted", len(gone), sum(info.size_bytes for info in gone), left)


LeftoverKind = Literal["abandoned", "removal", "strays", "conversion", "replacement", "uploads"]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Leftover files in one folder.

    Attributes:
        kind: "abandoned" (a save without commit), "removal" (interrupted), "strays" (files beside a
            checkpoint), "conversion" (killed), "replacement" (killed while replacing its target, which is
            restored) or "uploads" (nothing else).
        files: Removable files.
        uploads: Names of unfinished uploads, of saves and conversions that may still run.
        problem: Reason for not examining the folder further.
    """

    url: str
    kind: LeftoverKind
    files: tuple[FileInfo, ...] = ()
    uploads: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the removable files."""
        return sum(info.size_bytes for info in self.files)


def find_leftovers(
    root: str | os.PathLike[str], before_seconds: float, *, open_store: OpenStore = open_store
) -> list[tuple[Store, Leftovers]]:
    """Return leftovers older than ``before_seconds`` in ``root`` and its direct subfolders, without changing
    anything.

    Raises CheckpointNotFoundError without such a folder.
    """
    place = open_parent_folder(root, open_store=open_store)
    if not place.place.exists():
        raise CheckpointNotFoundError(f"{place.url}: no such folder", path=place.url)
    found = []
    for store in (open_store(root), *map(place.store, place.names())):
        try:
            left = _leftovers_of(store, before_seconds)
        except CheckpointError as error:
            if isinstance(error, StorageError):
                raise
            left = Leftovers(store.url, "strays", problem=str(error))
        if left is not None:
            found.append((store, left))
    if place.local_path is not None:
        for folder in ("", *place.names()):
            found += _conversions(place.local_path / folder, before_seconds)
    return found


def _conversions(root: Path, before_seconds: float) -> Iterator[tuple[Store, Leftovers]]:
    """Find work folders of inactive conversions to targets in ``root``."""
    for folder in sorted(root.glob(f"{TEMPORARY_PREFIX}convert-*")):
        paths = [path for path in folder.rglob("*") if path.is_file()]
        stats = {path: path.stat() for path in paths}
        if folder / LEDGER_NAME not in stats or max(one.st_mtime for one in stats.values()) >= before_seconds:
            continue
        kept = [old for old, _ in only_copies(folder)]
        files = tuple(
            FileInfo(str(path.relative_to(folder)), stat.st_size, stat.st_mtime)
            for path, stat in sorted(stats.items())
            if not any(path.is_relative_to(old) for old in kept)
        )
        kind: LeftoverKind = "replacement" if kept else "conversion"
        problem = refusal_to_put_back(folder)
        yield PosixStore(folder), Leftovers(str(folder), kind, files, problem=problem)


def _leftovers_of(store: Store, before_seconds: float) -> Leftovers | None:
    """Return the leftovers in one folder; None if there are none. Raises errors of a damaged manifest or
    notes.
    """
    files = store.list()
    if not any(is_commit_object(info.name) for info in files):
        if files and read_notes(store).deleting is not None:
            return Leftovers(store.url, "removal", tuple(files_to_remove(store, time.time())))
        gone = abandoned_files(store, before_seconds, files)
        if gone:  # an empty folder without a lock file may belong to a user
            data = tuple(info for info in gone if info.name != NOTES_NAME)
            return Leftovers(store.url, "abandoned", data, _uploads(store, files))
        strays: tuple[FileInfo, ...] = ()
    else:
        # unreferenced uploads of inactive saves
        young = [info for info in files if info.modified_seconds >= before_seconds]
        at_work = {owner_of(info.name) or info.name for info in young}
        old = [info for info in files if info.modified_seconds < before_seconds]
        old = [info for info in old if is_left_by_a_save(info.name)]
        old = [info for info in old if (owner_of(info.name) or info.name) not in at_work]
        used = frozenset(open_index(store).files) if old else frozenset()
        strays = tuple(info for info in old if info.name not in used)
    uploads = _uploads(store, files)
    if not strays and not uploads:
        return None
    return Leftovers(store.url, "strays" if strays else "uploads", strays, uploads)


def _uploads(store: Store, files: list[FileInfo]) -> tuple[str, ...]:
    """Return unfinished uploads of saves and of conversions with ledgers in ``files``."""
    ledgers = {info.name for info in files if info.name.startswith(TEMPORARY_PREFIX)}
    return unfinished_uploads(store, lambda name: is_written_under(ledgers, name))


def remove_leftovers(store: Store, left: Leftovers, before_seconds: float, *, uploads: bool) -> int:
    """Remove leftovers that are unchanged; return the number of removed files.

    With ``uploads``, all unfinished uploads are aborted, and running saves fail.
    """
    if left.kind == "removal":
        files = finish_removal(store, time.time()).files
    elif left.kind in ("conversion", "replacement"):
        files = len(left.files) if remove_work_folder(Path(left.url)) else 0
    elif left.kind == "abandoned":
        files = remove_abandoned(store, before_seconds).files
    else:
        # before removing files that an older `.metadata` may reference
        finished, _ = finish_drop(store)
        with store.lock(timeout_seconds=_LOCK_TIMEOUT_SECONDS):  # prevents a commit between check and removal
            store.sync()  # make the commit durable first
            now = _leftovers_of(store, before_seconds)
            still = {*left.files}.intersection(now.files if now is not None and now.kind == "strays" else ())
            gone = [info for info in store.list() if info in still]
            _delete(store, gone)
        _abort_uploads(store, gone)
        files = len(finished) + len(gone)
    if uploads and left.uploads:
        abort_uploads(store, frozenset(left.uploads).__contains__)
    return files
