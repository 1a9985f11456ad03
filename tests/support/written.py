"""How much each transaction writes, for which others wait."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, event

from dcp.server.database.engine import Database

__all__ = ["Written", "written_by"]


@dataclass(slots=True)
class Written:
    """Of all transactions the most: bytes of texts, rows, rows of parts removed; and how many there were."""

    most: int = 0
    most_inserted: int = 0
    most_removed: int = 0
    transactions: int = 0


@contextmanager
def written_by(database: Database) -> Iterator[Written]:
    """What is written by this object."""
    found, now = Written(), [0, 0, 0]

    def on_statement(
        _c: Any, _cursor: Any, statement: str, parameters: Any, context: Any, _many: bool
    ) -> None:
        if statement.startswith("DELETE FROM document_parts"):
            now[1] += context.cursor.rowcount
        many = parameters if isinstance(parameters, list) else [parameters]
        if statement.startswith("INSERT"):
            now[2] += len(many)
        for one in many:
            values = one.values() if isinstance(one, dict) else one
            now[0] += sum(_size(value) for value in values)

    def on_commit(_connection: Connection) -> None:
        found.most, found.most_removed = max(found.most, now[0]), max(found.most_removed, now[1])
        found.most_inserted = max(found.most_inserted, now[2])
        found.transactions += 1
        on_rollback(_connection)

    def on_rollback(_connection: Connection) -> None:
        now[:] = [0, 0, 0]

    events: dict[str, Callable[..., None]] = {
        "after_cursor_execute": on_statement,
        "commit": on_commit,
        "rollback": on_rollback,
    }
    for name, act in events.items():
        event.listen(database.writer, name, act)
    try:
        yield found
    finally:
        for name, act in events.items():
            event.remove(database.writer, name, act)


def _size(value: Any) -> int:
    value = getattr(value, "obj", value)  # psycopg's Jsonb
    if isinstance(value, dict | list):
        value = json.dumps(value)
    return len(value) if isinstance(value, str | bytes) else 0
