"""The index of a file, or of the files in a folder, that no commit has made a checkpoint: of which format it
is, and what that makes of it. Torch-free."""

from __future__ import annotations

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.format import BEGIN_BYTES, ReadFile, found
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.registry import by_precedence, format_of, formats
from dcp.storage.formats.torch.file import index_of_torch_file
from dcp.storage.stores.base import Store

__all__ = ["complete_index", "index_of_file", "index_of_folder"]


def index_of_file(store: Store, name: str) -> CheckpointIndex:
    """The index of one file of ``store``, of the format that its name or how it begins says.

    Raises CheckpointNotFoundError if it is absent.
    """
    with store.open_read(name) as handle:
        read_file = _reader_of(name, handle.pread(min(BEGIN_BYTES, handle.size_bytes), 0))
        try:
            return read_file(lambda at, count: handle.pread(count, at), handle.size_bytes, name)
        except CheckpointFormatError as error:
            path = store.path_of(name)
            raise type(error)(f"{path}: {error}", **({"path": path} | error.facts)) from error


def _reader_of(name: str, begin: bytes) -> ReadFile:
    of_files = [(one, one.read_file) for one in by_precedence(formats()) if one.read_file is not None]
    for one, read_file in of_files:
        if one.names_suffice and one.has_suffix(name):
            return read_file
    for one, read_file in of_files:
        if one.begins_so(begin):
            return read_file
    return index_of_torch_file  # which knows older ones and their likes, and so tells best what it is


def index_of_folder(store: Store) -> CheckpointIndex | None:
    """The index of the files in a folder that are one checkpoint together; None if there are none.

    Raises what the formats raise: CorruptCheckpointError where files or tensors are missing,
    CheckpointFormatError for names that reach outside the folder, and for names that stand twice.
    """
    for one in by_precedence(formats()):
        if one.read_folder is not None and (index := one.read_folder(store)) is not None:
            return index
    return None


def complete_index(store: Store, index: CheckpointIndex) -> CheckpointIndex:
    """``index`` with what its format has besides tensors, where that takes more than reading the index.

    Raises CheckpointFormatError where that is malformed.
    """
    one = format_of(index.format)
    if one is None or one.complete is None:
        return index
    completed: CheckpointIndex = found(one.complete)(store, index)
    return completed
