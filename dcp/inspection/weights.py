"""Which files of a folder are weights without a commit object, by their names: what `dcp.load` and
`dcp.convert` take as a folder, and what they take as single files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dcp.storage.errors import CheckpointError
from dcp.storage.formats.format import BEGIN_BYTES
from dcp.storage.formats.registry import by_precedence, file_suffixes, formats
from dcp.storage.stores.base import FileInfo, Store

__all__ = ["folder_weights", "is_weight_file", "single_files"]


def folder_weights(files: Sequence[FileInfo]) -> list[FileInfo]:
    """The files that are one set of weights together; as far as names tell."""
    shown = [file for file in files if not file.name.startswith(".")]
    for one in by_precedence(formats()):
        belongs = one.is_in_folder if one.names_suffice else one.marks_folder
        found = [file for file in shown if belongs(file.name)]
        if one.suffixes:  # what only lists the others is no weights
            found = [file for file in found if one.has_suffix(file.name)]
        if found:
            return found
    return []


def single_files(files: Sequence[FileInfo], known: Collection[str]) -> list[FileInfo]:
    """The files that could each be weights, without those ``known`` as parts of the folder's."""
    suffixes = file_suffixes()
    return [
        file
        for file in files
        if file.name.lower().endswith(suffixes) and not file.name.startswith(".") and file.name not in known
    ]


def is_weight_file(store: Store, file: FileInfo) -> bool:
    """Whether the file begins as one of the formats that its name may be of: ``.bin`` may be anything."""
    if any(one.names_suffice and one.has_suffix(file.name) for one in formats()):
        return True
    try:
        begin, _ = store.read_start(file.name, BEGIN_BYTES)
        return any(one.begins_so(begin) for one in formats())
    except CheckpointError:  # whoever opens it will tell
        return True
