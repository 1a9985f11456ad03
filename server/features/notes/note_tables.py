"""Tables of notes and of their earlier texts."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, Float, ForeignKey, Index, Integer, String, Table, Text

from dcp.server.database.mapping import ID
from dcp.server.database.tables import metadata, resource_table

notes: Final = resource_table(
    "notes",
    Column("run_id", ID, ForeignKey("runs.id"), nullable=False),
    Column("checkpoint_id", ID, ForeignKey("checkpoints.id")),  # none: of the run as a whole
    Column("text", Text, nullable=False),
    Column("author", String(128), nullable=False),
    Column("owner", String(256), nullable=False),  # the author's identity, which is never used again
    Column("edited_by", String(128)),
    Index(None, "run_id", "id"),
    Index(None, "checkpoint_id", "id"),
)

note_versions: Final = Table(
    "note_versions",
    metadata,
    Column("note_id", ID, ForeignKey("notes.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("text", Text, nullable=False),
    Column("author", String(128), nullable=False),
    Column("at_seconds", Float, nullable=False),
)
"""Texts before edits, each with its author."""
