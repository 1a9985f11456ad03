"""The index that counts in a folder: our manifest, stock's `.metadata`, or those that ranks saved alone.

Torch-free.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, ParamSpec, TypeVar

from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME, RANK_LOCAL
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import MAX_MANIFEST_BYTES, decode_manifest
from dcp.storage.formats.torch.metadata.reader import decode_torch_metadata
from dcp.storage.formats.torch.metadata.writer import torch_metadata_head
from dcp.storage.formats.views import join_indexes
from dcp.storage.stores.base import Store
from dcp.storage.threads import WorkerThreads, result_of

__all__ = [
    "MAX_TORCH_METADATA_BYTES",
    "has_checkpoint",
    "is_large_metadata_of",
    "open_index",
    "saved_by_rank",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_P = ParamSpec("_P")

MAX_TORCH_METADATA_BYTES: Final = 8 << 30

_ATTEMPTS: Final = 8
_PROBED_NAMES: Final = 16
_LARGE_CHUNKS: Final = 50_000
"""With as many, `.metadata` has some ten megabytes."""
_START_BYTES: Final = 128 << 10
"""Of `.metadata`, which many checkpoints have no more of; of the others it tells which save they are of."""
_OUR_DATA_FILE: Final = re.compile(rb"__[0-9]+_[0-9]+\.[0-9a-f]{8}\.distcp")
_STOCK_DATA_FILE: Final = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def open_index(store: Store, *, rank: int | None = None, own_rank: int | None = None) -> CheckpointIndex:
    """Return the index of the checkpoint that is committed in ``store``.

    It is the manifest, unless stock torch has overwritten the folder since (then `.metadata`). Without one
    it is `.metadata`, and without that what ranks saved on their own: that of ``rank`` if it is given
    and there, or all of them joined, where ``own_rank`` saved something else than others its own.

    Raises CheckpointNotFoundError if nothing is committed, and the decoders' errors with ``path`` added: a
    damaged manifest is never papered over with another file.
    """
    index = _open_pair(store, MANIFEST_NAME, METADATA_NAME)
    if index is not None:
        return index
    ranks = _local_ranks(store)
    if rank in ranks:
        ranks = [rank]
    # Where that takes requests, several at a time: there may be a thousand ranks.
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
    """Return whether anything is committed in ``store``; its files are not opened."""
    if store.stat(MANIFEST_NAME) is not None or store.stat(METADATA_NAME) is not None:
        return True
    return bool(_local_ranks(store))


def saved_by_rank(store: Store) -> bool:
    """Return whether all that ``store`` holds is what ranks saved on their own
    (``use_collectives=False``)."""
    together = store.stat(MANIFEST_NAME) or store.stat(METADATA_NAME)
    return together is None and bool(_local_ranks(store))


def _open_pair(store: Store, manifest_name: str, metadata_name: str) -> CheckpointIndex | None:
    """Return the index of one manifest and the `.metadata` beside it; None if both are absent."""
    for _ in range(_ATTEMPTS):
        manifest, index, start = _read_pair(store, manifest_name, metadata_name)
        if manifest is None or index is None:
            metadata = _whole(store, metadata_name, start)
            if metadata is None:
                return None
            # Our save writes its manifest first, and it may have come between the two readings.
            if _OUR_DATA_FILE.search(metadata):
                if store.stat(manifest_name) is not None:
                    continue
                logger.warning(
                    "%s is missing, although dcp saved this checkpoint: it is read by %s alone, without "
                    "types of keys (they are strings now), empty dicts, digests, user metadata, provenance. "
                    "Restore the manifest from a copy, or load the checkpoint and save it again",
                    store.path_of(manifest_name),
                    metadata_name,
                )
            with _located(store.path_of(metadata_name)):
                return decode_torch_metadata(metadata)
        if start is None:
            return index
        if len(start.data) < start.size_bytes and _is_long_start_of(index, start):
            return index
        metadata = _whole(store, metadata_name, start)
        published = index.torch_metadata_crc, index.replaced_torch_metadata_crc  # with it, or to be replaced
        if metadata is None or crc32(metadata) in published:
            return index
        # Our save replaces two files, one after the other: only if the manifest is still the same was
        # it another writer of .metadata, or damage.
        if _unless_missing(store.read, manifest_name, limit_bytes=MAX_MANIFEST_BYTES) != manifest:
            continue
        if _is_ours(index, metadata):
            logger.warning(
                "%s differs from what was committed with the manifest beside it: it is damaged. dcp reads "
                "the manifest; stock torch would read the damaged file. Save again, or restore it.",
                store.path_of(metadata_name),
            )
            return index
        with _located(store.path_of(metadata_name)):
            return decode_torch_metadata(metadata)
    raise CheckpointConflictError(
        f"{store.url} was replaced {_ATTEMPTS} times while it was being opened; give each save its own id",
        path=store.url,
    )


class _Start(NamedTuple):
    """The first bytes of a file of ``size_bytes``."""

    data: bytes
    size_bytes: int


def _read_pair(
    store: Store, manifest_name: str, metadata_name: str
) -> tuple[bytes | None, CheckpointIndex | None, _Start | None]:
    """Return (the manifest, what it says, the start of `.metadata`), None for what is absent.

    Where that takes requests they are under way at once. Either may then be the older one: whoever finds that
    they do not belong together looks again.
    """

    def decoded() -> tuple[bytes | None, CheckpointIndex | None]:
        manifest = _unless_missing(store.read, manifest_name, limit_bytes=MAX_MANIFEST_BYTES)
        if manifest is None:
            return None, None
        with _located(store.path_of(manifest_name)):
            return manifest, decode_manifest(manifest)

    if not store.read_profile.scatter:
        return *decoded(), _start_of(store, metadata_name)
    with WorkerThreads(1) as pool:
        beside = pool.submit(_start_of, store, metadata_name)
        return *decoded(), result_of(beside)


def _start_of(store: Store, name: str) -> _Start | None:
    found = _unless_missing(store.read_start, name, _START_BYTES)
    return None if found is None else _Start(*found)


def _whole(store: Store, name: str, start: _Start | None) -> bytes | None:
    """Return the file that has ``start``; None if it is absent."""
    if start is None or len(start.data) == start.size_bytes:
        return None if start is None else start.data
    return _unless_missing(store.read, name, limit_bytes=MAX_TORCH_METADATA_BYTES)


def _is_long_start_of(index: CheckpointIndex, start: _Start) -> bool:
    """Return whether `.metadata`, longer than ``start``, says there that it is of the save of ``index``.

    Then ``index`` is the truth, even if the file is damaged further on, and reading it is not worth the time.
    """
    save_id = index.provenance.get("save_id")
    if index.torch_metadata_crc is None:
        return False
    return isinstance(save_id, str) and start.data.startswith(torch_metadata_head(save_id, start.size_bytes))


def is_large_metadata_of(store: Store, name: str, index: CheckpointIndex) -> bool:
    """Return whether `.metadata` is large, and its first bytes say that it is of the save of ``index``.

    Then ``index`` is the truth, even if the file is damaged further on, and reading it is not worth the time.
    Where it is small one request for all of it is cheaper than this.
    """
    if index.chunk_count < _LARGE_CHUNKS:
        return False
    start = _start_of(store, name)
    if start is None or len(start.data) == start.size_bytes:
        return False
    return _is_long_start_of(index, start)


def _is_ours(index: CheckpointIndex, metadata: bytes) -> bool:
    """Return whether ``metadata``, though it differs from every one committed, was written by this package.

    Stock knows neither our save id nor files that are named as only ours are. After a crash in the middle of
    a commit they are those of the save before.
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
        except CorruptCheckpointError:  # replaced between two requests: the new one is whole
            if attempt == _ATTEMPTS:
                raise
    return None


def _local_ranks(store: Store) -> list[int]:
    matches = (RANK_LOCAL.fullmatch(info.name) for info in store.list())
    return sorted({int(match[1]) for match in matches if match})


@contextmanager
def _located(path: str) -> Iterator[None]:
    """Adds ``path`` to errors of the decoders, which see bytes and not files."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}", **({"path": path} | error.facts)) from error


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
        f"{store.url} holds no checkpoint: no {looked_for} is there. Check the path.",
        path=store.url,
        data_files=0,
    )
