"""Which files of a folder are weights without a commit object, by their names: what `dcp.load` and
`dcp.convert` take as a folder, and what they take as single files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dcp.storage.errors import CheckpointError
from dcp.storage.formats.safetensors.folder import SAFETENSORS_SUFFIX
from dcp.storage.formats.sources import FILE_SUFFIXES
from dcp.storage.stores.base import FileInfo, Store

__all__ = ["folder_weights", "is_weight_file", "single_files"]

_BIN_NAMES = ("pytorch_model.bin", ".bin.index.json")
_ZIP, _LEGACY_PICKLE = b"PK\x03\x04", b"\x80"


def folder_weights(files: Sequence[FileInfo]) -> list[FileInfo]:
    """The files that are one set of weights together; as far as names tell."""
    shown = [file for file in files if not file.name.startswith(".")]
    found = [file for file in shown if file.name.endswith(SAFETENSORS_SUFFIX)]
    if not found and any(file.name.endswith(_BIN_NAMES) for file in shown):
        found = [
            file for file in shown if file.name.startswith("pytorch_model") and file.name.endswith(".bin")
        ]
    return found


def single_files(files: Sequence[FileInfo], known: Collection[str]) -> list[FileInfo]:
    """The files that could each be weights, without those ``known`` as parts of the folder's."""
    return [
        file
        for file in files
        if file.name.lower().endswith(FILE_SUFFIXES)
        and not file.name.startswith(".")
        and file.name not in known
    ]


def is_weight_file(store: Store, file: FileInfo) -> bool:
    """Whether the file begins as one of torch.save or safetensors: ``.bin`` may be anything."""
    if file.name.endswith(SAFETENSORS_SUFFIX):
        return True
    try:
        begin, _ = store.read_start(file.name, 9)
    except CheckpointError:  # whoever opens it will tell
        return True
    return begin.startswith((_ZIP, _LEGACY_PICKLE)) or begin[7:] == b"\0{"
