"""Roots as rows: what the configuration names, and what it named once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, false, select, true, update

from dcp.server.catalog.errors import MissingError
from dcp.server.database.sql import insert_missing
from dcp.server.database.tables import checkpoints, roots

__all__ = [
    "LIVING",
    "RootRow",
    "has_living",
    "list_roots",
    "root_id",
    "root_row",
    "set_scanned",
    "sync_roots",
]

LIVING: Final = ("committed", "unreadable", "incomplete")
"""States of checkpoints that are there, as far as is known."""


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

    @property
    def lost(self) -> int:
        """The number of checkpoints that the last scan did not find and did not believe to be gone."""
        found = self._noted("lost")
        return found if type(found) is int else 0

    @property
    def doubted_runs(self) -> frozenset[str]:
        """Runs that they are of."""
        found = self._noted("doubted_runs")
        return frozenset(found) if isinstance(found, list) else frozenset()

    @property
    def is_other_place(self) -> bool:
        """True if the last scan found no checkpoint that the catalog knew."""
        return self._noted("is_other_place") is True

    def _noted(self, name: str) -> Any:
        # Written by the version that scanned last, which may be another one.
        return self.scan_state.get(name) if isinstance(self.scan_state, dict) else None


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


def has_living(connection: Connection, name: str) -> bool:
    """Return True if the catalog knows checkpoints in the root that are there, as far as is known."""
    query = (
        select(checkpoints.c.id)
        .join(roots, roots.c.id == checkpoints.c.root_id)
        .where(roots.c.name == name, checkpoints.c.state.in_(LIVING))
        .limit(1)
    )
    return connection.execute(query).first() is not None


def list_roots(connection: Connection, visible: frozenset[str] | None = None) -> list[RootRow]:
    """All roots that may be seen, by name."""
    rows = connection.execute(select(roots).order_by(roots.c.name)).all()
    return [RootRow(**row._mapping) for row in rows if visible is None or row.name in visible]


def set_scanned(
    connection: Connection, name: str, *, state: Any, error: str | None = None, now: float
) -> None:
    """A scan of the root has ended: its state for the next one, and why it failed if it did."""
    number = root_id(connection, name)
    _update(connection, number, scan_state=state, scan_error=error, scanned_seconds=now)


def _update(connection: Connection, number: int, **values: Any) -> None:
    connection.execute(update(roots).where(roots.c.id == number).values(**values))
