"""The automatic choice of a storage by checkpoint id."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dcp.storage.errors import CheckpointError
from dcp.storage.stores import open_store
from dcp.storage.stores.opening import OpenWith, check_storage_options
from dcp.storage.torch_storage.reader import FileSystemReader
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

__all__ = ["choose_reader", "choose_writer", "with_options", "with_own_id"]


def choose_reader(
    reader: StorageReader | None,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None = None,
) -> StorageReader:
    """Give ``reader``, pointed at ``checkpoint_id`` if given; without one, a `FileSystemReader` of the id."""
    if reader is None:
        place, opener = _place(checkpoint_id, storage_options)
        return FileSystemReader(place, open_store=opener)
    _refuse_others(reader, "storage_reader", "read_metadata", storage_options)
    if checkpoint_id is not None:
        reader.reset(checkpoint_id)
    return reader


def choose_writer(
    writer: StorageWriter | None,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None = None,
) -> StorageWriter:
    """Give ``writer``, pointed at ``checkpoint_id`` if given; without one, a `FileSystemWriter` of the id."""
    if writer is None:
        place, opener = _place(checkpoint_id, storage_options)
        return FileSystemWriter(place, open_store=opener)
    _refuse_others(writer, "storage_writer", "write_data", storage_options)
    if checkpoint_id is not None:
        writer.reset(checkpoint_id)
    return writer


def with_options(writer: FileSystemWriter, opener: OpenWith) -> FileSystemWriter:
    """Let ``writer`` open its store with the options of ``opener`` if it was given none of its own."""
    own = writer.open_store
    if own is open_store or (isinstance(own, OpenWith) and not own.storage_options):
        through_fsspec = isinstance(own, OpenWith) and own.through_fsspec
        writer.open_store = OpenWith(opener.storage_options, through_fsspec=through_fsspec)
    return writer


def with_own_id(writer: StorageWriter) -> StorageWriter:
    """Copy a `FileSystemWriter`, which the caller may point at the next id while a save with the copy is
    under way; other writers cannot be copied in general."""
    return copy.copy(writer) if isinstance(writer, FileSystemWriter) else writer


def _refuse_others(
    storage: object, argument: str, method: str, storage_options: Mapping[str, Any] | None
) -> None:
    # The second positional argument is the storage, as it was before torch 2.2; a place is easily put there.
    if isinstance(storage, str | os.PathLike):
        raise CheckpointError(
            f"{os.fspath(storage)!r} was given as the {argument}; give a place by its name: "
            f"checkpoint_id={os.fspath(storage)!r}"
        )
    if isinstance(storage, type):
        raise CheckpointError(f"the {argument} is the class {storage.__name__}; make one of it")
    if not hasattr(storage, method):
        raise CheckpointError(f"a {type(storage).__name__} is no {argument}: it has no method {method}")
    check_storage_options(storage_options)
    if storage_options:
        raise CheckpointError(
            f"storage_options are for the storage that is chosen by checkpoint_id, and {argument} is given "
            f"as well: give the options to that {type(storage).__name__} where it is made, as in "
            "dcp.FsspecReader(url, **options)"
        )


def _place(
    checkpoint_id: str | os.PathLike[str] | None, storage_options: Mapping[str, Any] | None
) -> tuple[str | os.PathLike[str], OpenWith]:
    """Give the id and its opener; raises the error of an id that no store has, before anything is done."""
    opener = OpenWith(storage_options)
    if not checkpoint_id:
        raise CheckpointError(
            "`checkpoint_id` must be specified if storage_reader/storage_writer is None: give the place, or "
            "a storage that knows it"
        )
    opener(checkpoint_id)
    return checkpoint_id, opener
