"""Structures of the catalog, one at a time."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from dcp.server.catalog.contents.structures import StructureFacts, ensure_structures
from dcp.server.database.tables import structures

__all__ = ["ensure_structure", "get_structure"]


def ensure_structure(connection: Connection, facts: StructureFacts) -> int:
    """The id of the structure, which is written if nobody has."""
    return ensure_structures(connection, [facts])[facts.digest]


def get_structure(connection: Connection, structure_id: int) -> Row[Any]:
    """The structure's row."""
    return connection.execute(select(structures).where(structures.c.id == structure_id)).one()
