"""Names of tensors as patterns: in small letters, each number as "#".

Layers of a model differ by numbers only. So there are some hundred patterns of a million names, and a search
looks at those alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import Connection, insert

from dcp.server.catalog.name_patterns import pattern_of
from dcp.server.database.sql import insert_missing
from dcp.server.database.tables import structure_patterns, tensor_patterns

__all__ = ["write_patterns"]

_MAX_PATTERNS: Final = 5_000
"""Of one structure, which are written in one transaction; of stranger ones the first are found."""


def write_patterns(connection: Connection, structure_id: int, names: Iterable[str]) -> None:
    """The patterns of the names of a structure, which are in its order."""
    found: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        pattern = pattern_of(name)
        if pattern in found:
            found[pattern][1] += 1
        elif len(found) < _MAX_PATTERNS:
            found[pattern] = [position, 1]
    if not found:
        return
    insert_missing(connection, tensor_patterns, [{"pattern": pattern} for pattern in sorted(found)])
    rows: list[dict[str, Any]] = [
        {"structure_id": structure_id, "pattern": pattern, "position": position, "tensor_count": count}
        for pattern, (position, count) in found.items()
    ]
    connection.execute(insert(structure_patterns), rows)
