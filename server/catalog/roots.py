"""Roots as rows: what the configuration names, and what it named once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, false, select, true, update

from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.sql import insert_missing
from dcp.server.database.tables import roots

__all__ = ["RootRow", "list_roots", "root_id", "root_row", "set_scanned", "sync_roots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootRow:
    """A root. ``scan_state`` is the scanner's own."""

    id: int
    name: str
    url: str
    is_configured: bool
    scan_state: Any
    scanned_seconds: float | None
    scan_error: str | None
    created_seconds: float


def sync_roots(connection: Connection, urls: Mapping[str, str], *, now: float | None = None) -> None:
    """The configuration has these roots, by name: make new ones, and mark those that it has no more.

    A root whose URL changed begins anew to be scanned; its checkpoints are marked by that scan.
    """
    created = time.time() if now is None else now
    insert_missing(
        connection,
        roots,
        [{"name": name, "url": url, "created_seconds": created} for name, url in sorted(urls.items())],
    )
    for row in connection.execute(select(roots.c.id, roots.c.name, roots.c.url, roots.c.is_configured)):
        url = urls.get(row.name)
        if url is None and row.is_configured:
            _update(connection, row.id, is_configured=false())
        elif url is not None and url != row.url:
            _update(connection, row.id, is_configured=true(), url=url, scan_state=None)
        elif url is not None and not row.is_configured:
            _update(connection, row.id, is_configured=true())


def root_id(connection: Connection, name: str) -> int:
    """The number of a root; `MissingError` if there never was one of this name."""
    found = connection.execute(select(roots.c.id).where(roots.c.name == name)).scalar()
    if found is None:
        raise MissingError("root", name)
    return int(found)


def root_row(connection: Connection, name: str) -> RootRow:
    """A root; `MissingError` if there never was one of this name."""
    row = connection.execute(select(roots).where(roots.c.name == name)).one_or_none()
    if row is None:
        raise MissingError("root", name)
    return RootRow(**row._mapping)


def list_roots(connection: Connection, visible: frozenset[str] | None = None) -> list[RootRow]:
    """All roots that may be seen, by name."""
    rows = connection.execute(select(roots).order_by(roots.c.name)).all()
    return [RootRow(**row._mapping) for row in rows if visible is None or row.name in visible]


def set_scanned(
    connection: Connection, name: str, *, state: Any, error: str | None = None, now: float | None = None
) -> None:
    """A scan of the root has ended: its state for the next one, and why it failed if it did."""
    scanned = time.time() if now is None else now
    _update(
        connection, root_id(connection, name), scan_state=state, scan_error=error, scanned_seconds=scanned
    )


def _update(connection: Connection, number: int, **values: Any) -> None:
    connection.execute(update(roots).where(roots.c.id == number).values(**values))
