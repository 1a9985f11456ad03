"""Rows with unique names that users create: rules, retention policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, insert, select, update
from sqlalchemy.exc import IntegrityError

from dcp.server.catalog.errors import ChangedError, StateError

__all__ = ["NamedRows"]


@dataclass(frozen=True, slots=True)
class NamedRows:
    """Rows of ``table``, with id, name, version, and the times of their making and last change; ``what`` is
    how errors call one."""

    table: Table
    what: str

    def insert(self, connection: Connection, values: Mapping[str, Any], now: float) -> int:
        """The id of a new one; StateError if there is one of its name."""
        self._refuse_name(connection, values["name"], None)
        statement = insert(self.table).values(**values, created_seconds=now, updated_seconds=now)
        try:
            return int(connection.execute(statement.returning(self.table.c.id)).scalar_one())
        except IntegrityError as error:  # made in this instant
            raise self._taken(values["name"]) from error

    def update(self, connection: Connection, number: int, values: Mapping[str, Any], now: float) -> None:
        """Another version of it; StateError if there is another one of its name."""
        if "name" in values:
            self._refuse_name(connection, values["name"], number)
        table = self.table
        statement = update(table).where(table.c.id == number)
        try:
            connection.execute(statement.values(**values, version=table.c.version + 1, updated_seconds=now))
        except IntegrityError as error:
            raise self._taken(str(values.get("name"))) from error

    def lock(self, connection: Connection, number: int) -> None:
        """Lock the row until the end of the transaction, if it exists."""
        table = self.table
        connection.execute(select(table.c.id).where(table.c.id == number).with_for_update())

    def expect(self, number: int, version: int, expected: int | None) -> None:
        """ChangedError if it is not in the version expected, where one is."""
        if expected is not None and version != expected:
            raise ChangedError(self.what, number, expected=expected, version=version)

    def _refuse_name(self, connection: Connection, name: str, own: int | None) -> None:
        query = select(self.table.c.id).where(self.table.c.name == name)
        found = connection.execute(query).scalar()
        if found is not None and found != own:
            raise self._taken(name)

    def _taken(self, name: str) -> StateError:
        return StateError(f"there is a {self.what} {name!r} already", state="exists")
