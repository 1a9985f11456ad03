"""Names of commit objects: files that make a folder a checkpoint.

Separate from formats and stores, which both need the names.
"""

from __future__ import annotations

import re
from typing import Final

MANIFEST_NAME: Final = "manifest.msgpack"
"""Manifest of this package."""

METADATA_NAME: Final = ".metadata"
"""Metadata file of stock torch, also written beside the manifest."""

NOTES_NAME: Final = "notes.msgpack"
"""Notes of a manager about a checkpoint."""

DATA_SUFFIX: Final = ".distcp"
"""Suffix of data files."""

DATA_NAME: Final = re.compile(rf"__[0-9]+_[0-9]+(?:\.(?P<owner>[0-9a-f]+))?{re.escape(DATA_SUFFIX)}")
"""Name of a data file without a save id."""

RANK_LOCAL: Final = re.compile(
    rf"__(0|[1-9][0-9]{{0,8}})(?:\.{re.escape(MANIFEST_NAME)}|{re.escape(METADATA_NAME)})"
)
"""Commit object of a rank-local save; the group is the rank."""


def is_commit_object(name: str) -> bool:
    """Return True if a file of this name makes its folder a checkpoint."""
    return name in (MANIFEST_NAME, METADATA_NAME) or RANK_LOCAL.fullmatch(name) is not None
