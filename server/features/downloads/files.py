"""The files that a checkpoint is made of, as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dcp.server.core.data.opening import OpenCheckpoint
from dcp.server.core.problems import NotFoundError
from dcp.server.records.contents import FileRole, LostFile
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, check_name

__all__ = ["PRESIGNED_SECONDS", "RawFile", "file_etag", "file_of", "files_of", "lost_files", "presigned_url"]

PRESIGNED_SECONDS: Final = 300
"""A client follows a redirect at once; a download that has begun is not ended by it."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """A file of a checkpoint, and what it is there for."""

    info: FileInfo
    role: FileRole


def files_of(opened: OpenCheckpoint) -> list[RawFile]:
    """All files of the checkpoint by name: of a single file that one alone, whatever lies beside it.

    Raises errors of the store.
    """
    from dcp.storage.commit_names import is_commit_object  # only here, as all that reads checkpoints

    data = set(opened.index.files)
    if opened.file is not None:
        info = opened.store.stat(opened.file)
        return [] if info is None else [RawFile(info, "data")]
    found = []
    for info in opened.store.list():
        if not info.name.startswith(TEMPORARY_PREFIX):
            is_commit = is_commit_object(info.name)
            found.append(RawFile(info, "data" if info.name in data else "commit" if is_commit else "other"))
    return found


def lost_files(opened: OpenCheckpoint, present: Iterable[RawFile]) -> list[LostFile]:
    """The data files that the index names and that are not among those ``present``, or of another size."""
    from dcp.storage.formats.index import UNKNOWN

    sizes = {file.info.name: file.info.size_bytes for file in present}
    found = []
    for name, size in zip(opened.index.files, opened.index.file_sizes.tolist(), strict=True):
        expected = None if size == UNKNOWN else size
        if name not in sizes or expected not in (None, sizes[name]):
            found.append(LostFile(name, sizes.get(name), expected))
    return found


def file_of(opened: OpenCheckpoint, name: str) -> RawFile:
    """The file called ``name``. Raises NotFoundError, CheckpointFormatError for what cannot be a name, and
    errors of the store."""
    info = None
    if opened.file in (None, name) and not check_name(name).startswith(TEMPORARY_PREFIX):
        info = opened.store.stat(name)
    if info is None:
        raise NotFoundError(f"the checkpoint has no file {name[:255]!r}")
    return RawFile(info, "data" if name in opened.index.files else "other")


def file_etag(opened: OpenCheckpoint, file: RawFile) -> str:
    """Another one whenever the file is replaced."""
    return opened.etag("file", file.info.name, file.info.size_bytes, file.info.modified_seconds)


def presigned_url(opened: OpenCheckpoint, file: RawFile) -> str | None:
    """Where the storage itself gives the file to whoever has this URL; None where it does not."""
    sign = getattr(opened.store, "presigned_url", None)
    return None if sign is None else sign(file.info.name, PRESIGNED_SECONDS)
