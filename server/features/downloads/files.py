"""The files of a checkpoint, as they are in the storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dcp.server.core.data.opening import OpenCheckpoint
from dcp.server.core.problems import NotFoundError
from dcp.server.records.contents import FileRole, LostFile
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, check_name

__all__ = ["file_etag", "file_of", "files_of", "lost_files", "presigned_url"]

_PRESIGNED_SECONDS: Final = 300
"""Enough to follow a redirect; it does not end a download that has begun."""


def files_of(opened: OpenCheckpoint) -> list[tuple[FileInfo, FileRole]]:
    """All files of the checkpoint by name, with their roles; of a checkpoint of one file that one alone.

    Raises errors of the store.
    """
    from dcp.storage.commit_names import is_commit_object  # only here, as all that reads checkpoints

    if opened.file is not None:
        info = opened.store.stat(opened.file)
        return [] if info is None else [(info, "data")]
    data = set(opened.index.files)
    found: list[tuple[FileInfo, FileRole]] = []
    for info in opened.store.list():
        if not info.name.startswith(TEMPORARY_PREFIX):
            is_commit = is_commit_object(info.name)
            found.append((info, "data" if info.name in data else "commit" if is_commit else "other"))
    return found


def lost_files(opened: OpenCheckpoint, present: Iterable[tuple[FileInfo, FileRole]]) -> list[LostFile]:
    """The data files that the index names and that are not among those ``present``, or of another size."""
    from dcp.storage.formats.index import UNKNOWN

    sizes = {info.name: info.size_bytes for info, _ in present}
    found = []
    for name, size in zip(opened.index.files, opened.index.file_sizes.tolist(), strict=True):
        expected = None if size == UNKNOWN else size
        if name not in sizes or expected not in (None, sizes[name]):
            found.append(LostFile(name, sizes.get(name), expected))
    return found


def file_of(opened: OpenCheckpoint, name: str) -> FileInfo:
    """The file called ``name``. Raises NotFoundError, CheckpointFormatError for what cannot be a name, and
    errors of the store."""
    info = None
    if opened.file in (None, name) and not check_name(name).startswith(TEMPORARY_PREFIX):
        info = opened.store.stat(name)
    if info is None:
        raise NotFoundError(f"the checkpoint has no file {name[:255]!r}")
    return info


def file_etag(opened: OpenCheckpoint, info: FileInfo) -> str:
    """An entity tag that changes whenever the file is replaced."""
    return opened.etag("file", info.name, info.size_bytes, info.modified_seconds)


def presigned_url(opened: OpenCheckpoint, name: str) -> str | None:
    """A URL by which the storage itself serves the file; None where it cannot."""
    sign = getattr(opened.store, "presigned_url", None)
    return None if sign is None else sign(name, _PRESIGNED_SECONDS)
