"""The commit: from finished data files to a checkpoint that exists, in one atomic step.

1. Data files are complete and durable under names that nothing refers to yet.
2. The manifest is published exclusively: create-only for a new id, compare-and-replace for an overwrite.
This is
   the commit point. Before it readers see the old state, after it the new one, at any crash.
3. `.metadata`, for stock torch, is published after it. The manifest names the CRC of both the `.metadata`
that
   belongs to it and of the one it replaces, so until this step is done (or if a crash prevents it) our
   readers still know that the manifest is the truth, and stock's see the replaced checkpoint, whose files
   are still there.
4. Files of the replaced checkpoint are deleted, and what killed saves left behind.

The manifest goes first because only one of two racing writers may touch `.metadata`, and on an object store
the conditional PUT of the manifest is the only arbiter there is. Torch-free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.manifest import MANIFEST_NAME, METADATA_NAME, decode_manifest, encode_manifest
from dcp.storage.formats.torch_metadata_reader import decode_torch_metadata
from dcp.storage.formats.torch_metadata_writer import encode_torch_metadata
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store, Version

__all__ = ["Names", "Previous", "commit", "discard", "previous_state"]

logger = logging.getLogger(__name__)

_INDEX_LIMIT_BYTES = 16 << 30
_LOCK_TIMEOUT_SECONDS = 60.0
_LOOKS = 3
_OURS = re.compile(rf"__[0-9]+_[0-9]+\.[0-9a-f]+\.distcp|{re.escape(TEMPORARY_PREFIX)}.+")
_DELETABLE = re.compile(rf"__.*\.distcp|.*\.safetensors|{re.escape(TEMPORARY_PREFIX)}.+")
_CONFLICT = (
    "{}: another writer published here while this save ran; nothing of this save is kept. Give each save "
    "its own id, or let one job write to an id."
)


@dataclass(frozen=True)
class Names:
    """The two files that publish a checkpoint; rank-local saves have their own pair."""

    manifest: str = MANIFEST_NAME
    metadata: str = METADATA_NAME

    @classmethod
    def of_rank(cls, rank: int) -> Names:
        """Names of a save that one rank makes without the others (``use_collectives=False``)."""
        return cls(f"__{rank}.{MANIFEST_NAME}", f"__{rank}{METADATA_NAME}")


@dataclass(frozen=True)
class Previous:
    """What stood under the id when a save began: the versions to compare with, the files to clean up.

    ``strays`` are files of saves that had begun before and not committed. Whether they were killed or are
    still running: once this save has published, none of them can commit any more.
    """

    manifest: Version | None = None
    metadata: Version | None = None
    metadata_crc: int | None = None
    files: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()

    @property
    def exists(self) -> bool:
        """Whether a checkpoint, ours or stock's, is there."""
        return self.manifest is not None or self.metadata is not None


def previous_state(store: Store, names: Names) -> Previous:
    """Look at what is published under the id now; a damaged predecessor is no obstacle to replacing it.

    Raises CheckpointConflictError if other writers remove what they replace faster than it can be looked at.
    """
    for _ in range(_LOOKS):
        with contextlib.suppress(CheckpointNotFoundError):  # listed a moment ago: another writer committed
            return _look(store, names)
    raise CheckpointConflictError(_CONFLICT.format(store.url), path=store.url)


def _look(store: Store, names: Names) -> Previous:
    listing = [info.name for info in store.list()]
    manifest, metadata = store.version(names.manifest), store.version(names.metadata)
    files: set[str] = set()
    metadata_crc = None
    committed_crc = None
    if manifest is not None:
        with _tolerate("manifest", store):
            index = decode_manifest(store.read(names.manifest, limit_bytes=_INDEX_LIMIT_BYTES))
            files.update(index.files)
            committed_crc = index.torch_metadata_crc
            files.update({*_replaced_files(index)} & {*listing})
    if metadata is not None:
        data = store.read(names.metadata, limit_bytes=_INDEX_LIMIT_BYTES)
        metadata_crc = crc32(data)
        if metadata_crc != committed_crc:  # else it names the manifest's files, and decoding it takes seconds
            with _tolerate(".metadata", store):
                files.update(decode_torch_metadata(data).files)
    strays = _strays(listing) if names == Names() else ()
    return Previous(manifest, metadata, metadata_crc, tuple(sorted(files)), strays)


def _replaced_files(index: CheckpointIndex) -> list[str]:
    """What the commit of ``index`` was about to delete and could not name as ours; a crash left it behind."""
    names = index.provenance.get("replaced_files", [])
    return [name for name in names if type(name) is str] if isinstance(names, list) else []


def _strays(listing: list[str]) -> tuple[str, ...]:
    """Files named as only this package names them; none where ranks save on their own, beside each other."""
    if any(name.startswith("__") and name.endswith((MANIFEST_NAME, METADATA_NAME)) for name in listing):
        return ()
    return tuple(name for name in listing if _OURS.fullmatch(name))


@contextlib.contextmanager
def _tolerate(what: str, store: Store) -> Iterator[None]:
    try:
        yield
    except CheckpointNotFoundError:
        raise
    except CheckpointError as error:
        logger.warning(
            "the %s being replaced in %s cannot be read (%s); its data files stay behind for `dcp gc`",
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
    """Publish ``index`` as the checkpoint of ``store``; its data files must be complete.

    Returns the index as published. Raises CheckpointConflictError if the id changed since ``previous`` was
    taken, StorageError or StorageFullError if publishing failed. In both cases nothing of this save is
    visible, except where the error says ``committed=True``: the checkpoint stands, but `.metadata` could
    not be written.
    """
    metadata_bytes = (
        encode_torch_metadata(index, checkpoint_id=store.url, save_id=save_id) if torch_compatible else None
    )
    foreign = [name for name in previous.files if not _OURS.fullmatch(name)]
    index = dataclasses.replace(
        index,
        provenance={**index.provenance, **({"replaced_files": foreign} if foreign else {})},
        torch_metadata_crc=None if metadata_bytes is None else crc32(metadata_bytes),
        replaced_torch_metadata_crc=previous.metadata_crc,
    )
    manifest_bytes = encode_manifest(index)
    with store.lock(timeout_seconds=_LOCK_TIMEOUT_SECONDS):
        if store.version(names.metadata) != previous.metadata:
            raise CheckpointConflictError(_CONFLICT.format(store.url), path=store.url)
        _publish_manifest(store, names, manifest_bytes, previous, durable=durable)
        try:
            if metadata_bytes is not None:
                store.publish(names.metadata, metadata_bytes, durable=durable)
            elif previous.metadata is not None:
                store.delete(names.metadata)
        except Exception as error:
            kind = type(error) if isinstance(error, StorageError) else StorageError
            raise kind(
                f"{store.url}: the checkpoint is committed and loads with dcp, but {names.metadata} for "
                f"stock torch could not be written: {error}",
                **(getattr(error, "facts", {}) | {"path": store.url, "committed": True}),
            ) from error
    superseded = {*previous.files, *previous.strays} - {*index.files}
    # Whatever a hostile predecessor lists: only what can be data of a checkpoint is deleted.
    _delete_all(store, [name for name in superseded if _DELETABLE.fullmatch(name)])
    return index


def _publish_manifest(store: Store, names: Names, data: bytes, previous: Previous, *, durable: bool) -> None:
    try:
        store.publish(names.manifest, data, durable=durable, expected=previous.manifest)
    except CheckpointConflictError as error:
        raise CheckpointConflictError(_CONFLICT.format(store.url), path=store.url) from error
    except StorageError:
        if not _holds(store, names.manifest, data):
            raise
        logger.warning("%s: publishing reported an error, but the manifest is in place", store.url)


def _holds(store: Store, name: str, data: bytes) -> bool:
    """Whether the manifest got there although publishing it reported an error (a failed fsync after a
    rename)."""
    try:
        return store.read(name, limit_bytes=_INDEX_LIMIT_BYTES) == data
    except CheckpointError:
        return False


def discard(store: Store, save_id: str, names: Names) -> None:
    """Remove the data files of a save that failed, whichever rank wrote them.

    Those that the published manifest refers to stay: a save may also fail after its commit, when a rank is
    lost or an error hid that publishing had succeeded. Never raises: the failure that led here is the one to
    report.
    """
    try:
        strays = {info.name for info in store.list() if info.name.endswith(f".{save_id}.distcp")}
        strays -= _committed_files(store, names)
    except CheckpointError as error:
        logger.warning("%s: files of the failed save %s stay behind: %s", store.url, save_id, error)
        return
    _delete_all(store, strays)


def _committed_files(store: Store, names: Names) -> set[str]:
    try:
        return set(decode_manifest(store.read(names.manifest, limit_bytes=_INDEX_LIMIT_BYTES)).files)
    except CheckpointNotFoundError:
        return set()


def _delete_all(store: Store, names: Iterable[str]) -> None:
    """Delete what is no longer needed; a failure leaves strays for `dcp gc` and must not fail the save."""
    for name in sorted(names):
        try:
            store.delete(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, the save it follows has ended already
            logger.warning("%s: could not delete %s: %s", store.url, name, error)
