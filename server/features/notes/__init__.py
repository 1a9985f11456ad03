"""Notes in Markdown on runs and checkpoints, by people and programs, with the history of their edits."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature, Link
from dcp.server.features.notes import note_tables

__all__ = ["feature", "note_tables"]

feature: Final = Feature(
    "notes",
    __name__,
    web=["note_routes", "note_pages"],
    events=["note.created"],
    links=[Link("run", "Notes", "/runs/{id}/notes?with_checkpoints=true")],
)
