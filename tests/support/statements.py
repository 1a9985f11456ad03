"""SQL statements sent by an application."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event

__all__ = ["most_rows_inserted", "statements_to"]


@contextmanager
def statements_to(engine: Engine) -> Iterator[list[tuple[str, Any]]]:
    """Record each statement with its parameters; "COMMIT" and "ROLLBACK" between the transactions."""
    recorded: list[tuple[str, Any]] = []

    def on_statement(_one: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        recorded.append((statement, parameters))

    acts: dict[str, Callable[..., None]] = {
        "before_cursor_execute": on_statement,
        "commit": lambda _: recorded.append(("COMMIT", None)),
        "rollback": lambda _: recorded.append(("ROLLBACK", None)),
    }
    for name, act in acts.items():
        event.listen(engine, name, act)
    try:
        yield recorded
    finally:
        for name, act in acts.items():
            event.remove(engine, name, act)


def most_rows_inserted(recorded: list[tuple[str, Any]]) -> int:
    """Return the number of inserted rows of the transaction with the most."""
    most = rows = 0
    for statement, parameters in recorded:
        if statement in ("COMMIT", "ROLLBACK"):
            rows = 0
        elif statement.startswith("INSERT"):
            rows += len(parameters) if isinstance(parameters, list) else 1
            most = max(most, rows)
    return most
