"""The automatic choice of a storage by checkpoint id."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dcp.storage.errors import CheckpointError
from dcp.storage.reader import FileSystemReader
from dcp.storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

__all__ = ["choose_reader", "choose_writer", "refuse_user_metadata"]


def choose_reader(
    reader: StorageReader | None, checkpoint_id: str | os.PathLike[str] | None
) -> StorageReader:
    """``reader``, pointed at ``checkpoint_id`` if given; or the one of ours that can read the id."""
    if reader is not None:
        if checkpoint_id is not None:
            reader.reset(checkpoint_id)
        return reader
    return FileSystemReader(_checked(checkpoint_id))


def choose_writer(
    writer: StorageWriter | None, checkpoint_id: str | os.PathLike[str] | None
) -> StorageWriter:
    """``writer``, pointed at ``checkpoint_id`` if given; or the one of ours that can write the id."""
    if writer is not None:
        if checkpoint_id is not None:
            writer.reset(checkpoint_id)
        return writer
    return FileSystemWriter(_checked(checkpoint_id))


def refuse_user_metadata(writer: StorageWriter, user_metadata: Mapping[str, Any] | None) -> None:
    """Raises CheckpointError if ``writer``, which is not one of ours, is to store ``user_metadata``."""
    if user_metadata and not isinstance(writer, FileSystemWriter):
        raise CheckpointError(
            f"user_metadata needs a storage of ours; {type(writer).__name__} has no place for it"
        )


def _checked(checkpoint_id: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    if not checkpoint_id:
        raise CheckpointError(
            "give checkpoint_id, or a storage_writer or storage_reader that knows its place"
        )
    if not FileSystemWriter.validate_checkpoint_id(checkpoint_id):
        raise CheckpointError(
            f"no storage here can handle {os.fspath(checkpoint_id)!r}; give a storage_writer or "
            "storage_reader for it",
            path=os.fspath(checkpoint_id),
        )
    return checkpoint_id
