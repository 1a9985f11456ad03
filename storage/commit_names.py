"""Names of the files that make a folder a checkpoint: its commit objects.

Apart from formats, which read them, and stores, which list folders by them: neither imports the other for a
name.
"""

from __future__ import annotations

import re
from typing import Final

MANIFEST_NAME: Final = "manifest.msgpack"
"""Ours."""

METADATA_NAME: Final = ".metadata"
"""Stock torch's, which ours has beside the manifest."""

NOTES_NAME: Final = "notes.msgpack"
"""What a manager remembers of a checkpoint, in its folder."""

DATA_SUFFIX: Final = ".distcp"
"""How names of data files end, ours and stock's."""

DATA_NAME: Final = re.compile(rf"__[0-9]+_[0-9]+(?:\.(?P<owner>[0-9a-f]+))?{re.escape(DATA_SUFFIX)}")
"""Of a data file, ours or stock's, which has no id of a save."""

RANK_LOCAL: Final = re.compile(
    rf"__(0|[1-9][0-9]{{0,8}})(?:\.{re.escape(MANIFEST_NAME)}|{re.escape(METADATA_NAME)})"
)
"""Of what one rank saved on its own; the group is the rank."""


def is_commit_object(name: str) -> bool:
    """Return whether a file of this name makes its folder a checkpoint."""
    return name in (MANIFEST_NAME, METADATA_NAME) or RANK_LOCAL.fullmatch(name) is not None
