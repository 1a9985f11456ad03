"""Commit: publish finished data files as a checkpoint in one atomic step.

1. Data files are complete and durable, under names without references.
2. The manifest is published exclusively: create-only for a new id, compare-and-replace for an overwrite.
   This is the commit point: readers see the old checkpoint before and the new one after, at any crash.
3. `.metadata` for stock torch follows. The manifest holds the CRCs of its own `.metadata` and of the
   replaced one. Until this step completes, our readers know that the manifest is authoritative, and stock
   torch sees the replaced checkpoint, whose files still exist.
4. Files of the replaced checkpoint and remains of killed saves are deleted.

On a file system a lock excludes writers of other processes. Object stores have no lock, and these rules
apply:

- Of all saves that saw one manifest, only one can replace it. Manifests are unique (each contains the id of
  the save), and a save that lost can never commit later. Only the absence of a manifest can recur, after a
  deletion: the first save to an id checks that its data files still exist.
- `.metadata` replaces only the version read before our manifest was published. A save that commits after us
  replaces the version found then: ours, or ours comes later and is refused. Two operations compare with
  nothing and may come too late: creating `.metadata` after a successor without `.metadata`, and deleting it
  on a store without conditional deletes. After both, the manifest is read again, and `.metadata` is made to
  fit a successor's manifest. A crash in between leaves stock torch with a stale or missing `.metadata`; our
  readers detect this by the CRC.
- Only a committed save deletes files: those of the replaced checkpoint, and uncommitted files and uploads
  that existed when the save began, whose saves have lost. Later uploads may belong to a successor and stay.

Torch-free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import filterfalse
from operator import attrgetter

from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.opening import is_large_metadata_of
from dcp.storage.formats.registry import DCP, TORCH_DCP
from dcp.storage.formats.torch.metadata_reader import decode_torch_metadata
from dcp.storage.formats.torch.metadata_writer import encode_torch_metadata
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store, Version
from dcp.storage.threads import clearing_up

logger = logging.getLogger(__name__)

_INDEX_LIMIT_BYTES = 16 << 30
_LOCK_TIMEOUT_SECONDS = 60.0
_LOOKS = 3
_ATTEMPTS = 16
_OURS = re.compile(rf"__[0-9]+_[0-9]+\.[0-9a-f]+\.distcp|{re.escape(TEMPORARY_PREFIX)}.+")
_DATA_FILES = [one.data_files.pattern for one in (DCP, TORCH_DCP) if one.data_files is not None]
_DELETABLE = re.compile("|".join((*_DATA_FILES, f"{re.escape(TEMPORARY_PREFIX)}.+")), re.DOTALL)
_NAME = attrgetter("name")
_CONFLICT = (
    "{}: another writer published to this checkpoint id during this save, so this save was discarded. Give "
    "each save its own id, or use one writer per id."
)
_DOUBT = "may not survive a power cut, so the files of the replaced checkpoint are kept"


@dataclass(frozen=True)
class Names:
    """Names of the two files that publish a checkpoint; rank-local saves have separate names."""

    manifest: str = MANIFEST_NAME
    metadata: str = METADATA_NAME

    @classmethod
    def of_rank(cls, rank: int) -> Names:
        """Return the names for a save of one rank without the others (``use_collectives=False``)."""
        return cls(f"__{rank}.{MANIFEST_NAME}", f"__{rank}{METADATA_NAME}")


@dataclass(frozen=True)
class Previous:
    """State of an id at the begin of a save: versions to compare and files to clean up.

    ``strays`` are files of earlier uncommitted saves, and ``uploads`` their unfinished uploads. Killed or
    running, none of these saves can commit after this save.
    """

    manifest: Version | None = None
    metadata: Version | None = None
    metadata_crc: int | None = None
    files: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()

    @property
    def exists(self) -> bool:
        """True if a checkpoint exists, ours or stock's."""
        return self.manifest is not None or self.metadata is not None


def previous_state(store: Store, names: Names) -> Previous:
    """Read the published state of the id. A damaged predecessor can be replaced.

    Raises:
        CheckpointConflictError: If other writers replace files faster than the state can be read.
    """
    for _ in range(_LOOKS):
        # A listed file is missing or has another size: another writer committed.
        with contextlib.suppress(CheckpointNotFoundError, CorruptCheckpointError):
            return _look(store, names)
    raise CheckpointConflictError(_CONFLICT.format(store.url), path=store.url)


def _look(store: Store, names: Names) -> Previous:
    # Before the listing: an upload that finishes in between is then in both results, not missing in both.
    uploads: tuple[str, ...] = ()
    if names == Names() and not store.capabilities.is_local:  # local folders have no uploads
        uploads = unfinished_uploads(store)
    listing = list(map(_NAME, store.list()))
    if not listing:
        return Previous(uploads=uploads)
    # Listed files may be gone or replaced by now: versions are taken before reading, and publishing compares
    # them. A file published after the listing makes the create-only publish fail.
    manifest = store.version(names.manifest) if names.manifest in listing else None
    metadata = store.version(names.metadata) if names.metadata in listing else None
    files: set[str] = set()
    metadata_crc = None
    index = None
    if manifest is not None:
        with _tolerate("manifest", store):
            index = decode_manifest(store.read(names.manifest, limit_bytes=_INDEX_LIMIT_BYTES))
            files.update(index.files)
            # Left by a crash of the predecessor's cleanup.
            replaced = index.provenance.get("replaced_files")
            if isinstance(replaced, list):
                files.update({*listing}.intersection(name for name in replaced if type(name) is str))
    if metadata is not None:
        if index is not None and is_large_metadata_of(store, names.metadata, index):
            metadata_crc = index.torch_metadata_crc
        else:
            data = store.read(names.metadata, limit_bytes=_INDEX_LIMIT_BYTES)
            metadata_crc = crc32(data)
            if index is None or metadata_crc != index.torch_metadata_crc:  # otherwise it names the same files
                with _tolerate(".metadata", store):
                    files.update(decode_torch_metadata(data).files)
    # In a folder of rank-local saves, any file may belong to another rank.
    by_rank = any(name.startswith("__") and name.endswith((MANIFEST_NAME, METADATA_NAME)) for name in listing)
    together = names == Names() and not by_rank
    return Previous(
        manifest,
        metadata,
        metadata_crc,
        tuple(sorted(files)),
        tuple(filter(_OURS.fullmatch, listing)) if together else (),
        uploads if together else (),
    )


def unfinished_uploads(store: Store, belongs: Callable[[str], bool] = lambda name: False) -> tuple[str, ...]:
    """Return the files of saves with unfinished uploads, and other uploads accepted by ``belongs``."""
    found: list[str] = []

    def note(name: str) -> bool:
        if _OURS.fullmatch(name) or belongs(name):
            found.append(name)
        return False  # list only, abort nothing

    abort_uploads(store, note)
    return tuple(found)


@contextlib.contextmanager
def _tolerate(what: str, store: Store) -> Iterator[None]:
    try:
        yield
    except CheckpointNotFoundError:
        raise
    except CheckpointError as error:
        logger.warning(
            "the %s to be replaced in %s cannot be read (%s); its data files stay, remove them by `dcp gc`",
            what,
            store.url,
            error,
        )


def commit(
    store: Store,
    index: CheckpointIndex,
    previous: Previous,
    *,
    names: Names,
    save_id: str,
    durable: bool,
    torch_compatible: bool,
) -> CheckpointIndex:
    """Publish ``index`` as the checkpoint of ``store``. All data files must be complete.

    Returns:
        The published index.

    Raises:
        CheckpointConflictError: If the id changed since ``previous``. Nothing of this save is visible.
        StorageError: If publishing failed (StorageFullError without space). Nothing of this save is
            visible, unless ``committed=True``: the checkpoint exists, but `.metadata` is missing or the
            manifest may not survive a power cut. Files of the replaced checkpoint then stay, except a stale
            `.metadata`.
    """
    index.check()
    metadata_bytes = (
        encode_torch_metadata(index, checkpoint_id=store.url, save_id=save_id) if torch_compatible else None
    )
    provenance = dict(index.provenance)
    if foreign := list(filterfalse(_OURS.fullmatch, previous.files)):
        provenance["replaced_files"] = foreign
    index = dataclasses.replace(
        index,
        provenance=provenance,
        torch_metadata_crc=None if metadata_bytes is None else crc32(metadata_bytes),
        replaced_torch_metadata_crc=previous.metadata_crc,
    )
    manifest_bytes = encode_manifest(index, is_checked=True)  # columns are unchanged since the check
    with store.lock(timeout_seconds=_LOCK_TIMEOUT_SECONDS):
        if store.version(names.metadata) != previous.metadata:
            raise CheckpointConflictError(_CONFLICT.format(store.url), path=store.url)
        if names == Names():
            _require_files(store, index, previous)
        ours, doubt = _publish_manifest(store, names, manifest_bytes, previous, durable=durable)
        try:
            stands = _settle_metadata(store, names, ours, metadata_bytes, previous.metadata, durable=durable)
        except Exception as error:
            if isinstance(error, StorageError) and error.published:
                raise _after_commit(store, _DOUBT, error) from error
            fate = _remove_stale(store, names, previous.metadata, durable=durable)
            what = f"{names.metadata} for stock torch could not be written{fate}"
            raise _after_commit(store, what, error) from error
    if doubt is not None:
        raise _after_commit(store, _DOUBT, doubt) from doubt
    if not stands:
        logger.warning("%s: another save replaced this checkpoint right after its commit", store.url)
    elif previous.files or previous.strays or previous.uploads:
        _clean_up(store, names, index, previous)
    return index


def _require_files(store: Store, index: CheckpointIndex, previous: Previous) -> None:
    """Raise CheckpointConflictError unless all data files exist.

    Another rank may have written to another place. For a new id, another save may have committed, cleaned
    up these files as strays, and have been deleted.
    """
    absent = set(index.files).difference(map(_NAME, store.list()))
    # Listings of network file systems may lag by seconds; lookups by name do not.
    gone = sorted(name for name in absent if store.stat(name) is None) if absent else None
    if not gone:
        return
    if previous.manifest is not None and store.version(MANIFEST_NAME) != previous.manifest:
        raise CheckpointConflictError(_CONFLICT.format(store.url), path=store.url)
    raise CheckpointConflictError(
        f"{store.url}: {len(gone)} data files of this save, such as {gone[0]}, are missing, so the save was "
        "discarded. If ranks write to different places, give them the same id on shared storage. If another "
        "save or a clean-up removed the files as remains of a killed save, save again with a unique id",
        path=store.url,
    )


def _after_commit(store: Store, what: str, error: Exception) -> StorageError:
    kind = type(error) if isinstance(error, StorageError) else StorageError
    return kind(
        f"{store.url}: the checkpoint is committed and loads with dcp, but {what}: {error}",
        **(getattr(error, "facts", {}) | {"path": store.url, "committed": True}),
    )


def _publish_manifest(
    store: Store, names: Names, data: bytes, previous: Previous, *, durable: bool
) -> tuple[Version, StorageError | None]:
    """Publish the manifest; return the version, and the error if it may not survive a power cut."""
    try:
        return store.publish(names.manifest, data, durable=durable, expected=previous.manifest), None
    except CheckpointConflictError as error:
        raise CheckpointConflictError(_CONFLICT.format(store.url), path=store.url) from error
    except StorageError as error:
        version = _version_if(store, names.manifest, data)
        if version is None:
            if error.published:
                fate = _remove_stale(store, names, previous.metadata, durable=durable)
                what = f"{_DOUBT}, and {names.metadata} for stock torch was not written{fate}"
                raise _after_commit(store, what, error) from error
            raise
        logger.warning("%s: publishing the manifest reported an error, but succeeded: %s", store.url, error)
        return version, _doubt(store, error) if durable else None


def _doubt(store: Store, error: StorageError) -> StorageError | None:
    """Return the reason if a file published with ``error`` may not be durable. A repeated folder fsync
    proves nothing.
    """
    if error.published:
        return error
    try:
        store.sync()
    except StorageError as failed:
        return failed
    return None


def _version_if(store: Store, name: str, data: bytes) -> Version | None:
    """Return the version of a file with the content ``data`` after a failed publish (failed fsync, lost
    answer); None if different or unknown.
    """
    with contextlib.suppress(CheckpointError):
        for _ in range(_LOOKS):
            version = store.version(name)
            if version is None or store.read(name, limit_bytes=_INDEX_LIMIT_BYTES) != data:
                return None
            if store.version(name) == version:
                return version
    return None


def _settle_metadata(
    store: Store, names: Names, ours: Version, data: bytes | None, there: Version | None, *, durable: bool
) -> bool:
    """Set `.metadata` to ``data`` (None: absent) while the manifest is ``ours``.

    Only ``there``, the version read before the manifest was ours, is replaced. Returns False if another
    save replaced our manifest; nothing more is written then.
    """
    for attempt in range(_ATTEMPTS):
        if attempt or data is None:
            there = store.version(names.metadata)
            if store.version(names.manifest) != ours:
                return False
        written = None
        if data is not None:
            try:
                written = store.publish(names.metadata, data, durable=durable, expected=there)
            except CheckpointConflictError:
                continue
            if there is not None:
                return True
        elif there is None:
            return True
        elif not store.delete_if(names.metadata, there):
            continue
        if not _was_replaced(store, names, ours):
            return True
        _mend_metadata(store, names, data, written, durable=durable)
        return False
    raise StorageError(
        f"other writers replaced the file {_ATTEMPTS} times during the commit",
        path=store.path_of(names.metadata),
    )


def _remove_stale(store: Store, names: Names, there: Version | None, *, durable: bool) -> str:
    """Remove a stale `.metadata` before stock torch loads it; return text for the error message. Never
    raises.
    """
    if there is None:
        return ""
    try:
        if not store.delete_if(names.metadata, there):
            return ""  # another file exists, perhaps ours
        if durable:
            store.sync()
    except Exception as error:  # noqa: BLE001 - never raises
        return f", and stock torch loads the previous one, which could not be removed ({error})"
    return "; the previous one was removed, because stock torch would load it"


def _was_replaced(store: Store, names: Names, ours: Version) -> bool:
    """Return True if the manifest belongs to another save. If unknown, assume ours: a replacement within
    milliseconds is rare and harmless.
    """
    try:
        return store.version(names.manifest) != ours
    except Exception as error:  # noqa: BLE001 - assume ours
        logger.warning("%s: the manifest could not be checked after the commit: %s", store.url, error)
        return False


def _mend_metadata(
    store: Store, names: Names, data: bytes | None, written: Version | None, *, durable: bool
) -> None:
    """Restore `.metadata` of a save that replaced our manifest before we wrote ``data``, because its writer
    may have ended. Never raises.
    """
    try:
        for _ in range(_ATTEMPTS):
            manifest = store.version(names.manifest)
            if store.version(names.metadata) != written:
                return  # written by a later save, which maintains it
            wanted = _metadata_of_manifest(store, names)
            if store.version(names.manifest) != manifest:
                continue
            if wanted == data:
                return
            data = wanted
            if wanted is not None:
                written = store.publish(names.metadata, wanted, durable=durable, expected=written)
            elif written is not None:
                store.delete_if(names.metadata, written)
                written = None
    except CheckpointConflictError:  # written by a later save
        return
    except Exception as error:  # noqa: BLE001 - never raises
        logger.warning(
            "%s: another save committed at the same time, and %s may not match the manifest, so stock torch "
            "may fail to load it (%s): save again",
            store.url,
            names.metadata,
            error,
        )


def _metadata_of_manifest(store: Store, names: Names) -> bytes | None:
    """Return the `.metadata` that belongs to the manifest; None if absent or not reproducible."""
    try:
        index = decode_manifest(store.read(names.manifest, limit_bytes=_INDEX_LIMIT_BYTES))
    except CheckpointNotFoundError:
        return None
    save_id = index.provenance.get("save_id")
    if index.torch_metadata_crc is None or not isinstance(save_id, str):
        return None
    data = encode_torch_metadata(index, checkpoint_id=store.url, save_id=save_id)
    return data if crc32(data) == index.torch_metadata_crc else None


def _clean_up(store: Store, names: Names, index: CheckpointIndex, previous: Previous) -> None:
    """Delete replaced and stray files. Failures are left to the next save."""
    # A hostile predecessor may list any names: only names of checkpoint data are deleted.
    superseded = {
        name for name in {*previous.files, *previous.strays} - {*index.files} if _DELETABLE.fullmatch(name)
    }
    if not all(map(_OURS.fullmatch, superseded)) and not _is_settled(store, names, index):
        # Stock reuses data file names; these may belong to a new save.
        superseded = set(filter(_OURS.fullmatch, superseded))
    _delete_all(store, superseded)
    if previous.uploads:
        beaten = frozenset(previous.uploads)
        abort_uploads(store, beaten.__contains__)


def _is_settled(store: Store, names: Names, index: CheckpointIndex) -> bool:
    """Return True if `.metadata` is unchanged since this save."""
    try:
        data = store.read(names.metadata, limit_bytes=_INDEX_LIMIT_BYTES)
    except CheckpointNotFoundError:
        return index.torch_metadata_crc is None
    except Exception as error:  # noqa: BLE001 - the save succeeded; the next save removes strays
        logger.warning("%s: %s could not be checked after the commit: %s", store.url, names.metadata, error)
        return False
    return crc32(data) == index.torch_metadata_crc


@clearing_up()
def discard(store: Store, save_id: str, names: Names) -> None:
    """Remove the data files of a failed save, of all ranks.

    Files of the published manifest stay, because a save may fail after its commit. Never raises, to keep
    the original error.
    """
    ending = f".{save_id}.distcp"
    # First, to keep an active rank from finishing another file after the listing.
    abort_uploads(store, lambda name: name.endswith(ending))
    try:
        strays = {info.name for info in store.list() if info.name.endswith(ending)}
        if strays:
            with contextlib.suppress(CheckpointNotFoundError):
                manifest = store.read(names.manifest, limit_bytes=_INDEX_LIMIT_BYTES)
                strays.difference_update(decode_manifest(manifest).files)
    except CheckpointError as error:
        logger.warning(
            "%s: files of the failed save %s could not be removed, remove them by `dcp gc`: %s",
            store.url,
            save_id,
            error,
        )
        return
    _delete_all(store, strays)


def _delete_all(store: Store, names: Iterable[str]) -> None:
    """Delete unneeded files; failures leave strays for `dcp gc`."""
    try:
        failed = store.delete_all(sorted(names))
    except Exception as error:  # noqa: BLE001 - the save has ended already
        failed = {"unneeded files": error}
    for name, reason in failed.items():
        logger.warning("%s: could not delete %s, which `dcp gc` removes: %s", store.url, name, reason)


def abort_uploads(store: Store, belongs: Callable[[str], bool]) -> None:
    """Abort unfinished uploads. Never raises: listing uploads needs a separate permission."""
    try:
        store.abort_uploads(belongs)
    except Exception as error:  # noqa: BLE001 - never raises
        logger.debug("%s: unfinished uploads cannot be aborted: %s", store.url, error)
