"""Names that files and places may have."""

from __future__ import annotations

import os
from typing import Final

from dcp.storage.errors import CheckpointFormatError, StorageError

__all__ = ["LOCK_NAME", "TEMPORARY_PREFIX", "check_name", "is_name", "place_text"]

LOCK_NAME: Final = ".lock"
"""The advisory lock's file where a backend needs one; reserved, and left out of listings."""

TEMPORARY_PREFIX: Final = ".tmp-"
"""Files written aside for a publish are named so. A crash may leave one; garbage collection removes it."""

_NAME_LIMIT_BYTES: Final = 255


def check_name(name: str) -> str:
    """Return ``name`` itself if it is one plain path component that a file of a store may have.

    Raises `CheckpointFormatError` otherwise: names come out of metadata that others wrote, and must not
    reach outside of the folder.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _NAME_LIMIT_BYTES or name in (".", "..", LOCK_NAME):
        fault = "empty, reserved, not UTF-8, or longer than 255 bytes"
    elif "/" in name or "\\" in name or "\0" in name:
        fault = "has a path separator or NUL in it"
    else:
        return name
    raise CheckpointFormatError(
        f"file name {name!r} is not allowed in a checkpoint: {fault}; "
        "the metadata that names it is damaged or hostile",
        name=name,
    )


def is_name(name: str) -> bool:
    """Return whether a file or folder of a store may have this name."""
    try:
        check_name(name)
    except CheckpointFormatError:
        return False
    return True


def place_text(place: object) -> str:
    """Return the path or URL that names a place, as text; `StorageError` for what names none."""
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(text, str):
        raise StorageError(
            f"a checkpoint is named by a str or a path, and {text!r:.100} is of type {type(text).__name__}"
            + (": decode it, as by os.fsdecode()" if isinstance(text, bytes | bytearray) else ""),
            op="open",
        )
    if not text:
        raise StorageError("an empty path names no folder: pass '.' for the current one", op="open")
    if "\0" in text:
        raise StorageError(f"{text!r:.200} has a NUL character in it, which no path may have", op="open")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise StorageError(
            f"{text!r:.200} has a character that the file system's encoding lacks", op="open"
        ) from None
    return text
