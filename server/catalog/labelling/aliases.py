"""Aliases: names such as "best" or "production" that move from checkpoint to checkpoint of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, insert, select, update

from dcp.server.catalog.details import bump, lock_checkpoint
from dcp.server.catalog.errors import ChangedError, MissingError, ProtectedError, StateError
from dcp.server.catalog.labelling.labels import Change
from dcp.server.catalog.values import check_label
from dcp.server.database.records import record_of_row
from dcp.server.database.tables import aliases, roots, runs
from dcp.server.records.labels import Alias

__all__ = ["delete_alias", "get_alias", "list_aliases", "set_alias"]


def get_alias(connection: Connection, run_id: int, name: str, visible: frozenset[str] | None = None) -> Alias:
    """One alias; `MissingError` if there is none that may be seen."""
    row = connection.execute(
        _select(visible).where(aliases.c.run_id == run_id, aliases.c.name == name)
    ).first()
    if row is None:
        raise MissingError("alias", name)
    return _alias(row)


def list_aliases(connection: Connection, run_id: int, visible: frozenset[str] | None = None) -> list[Alias]:
    """The aliases of a run, by name."""
    query = _select(visible).where(aliases.c.run_id == run_id)
    return sorted(map(_alias, connection.execute(query)), key=lambda alias: alias.name)


def set_alias(
    connection: Connection,
    run_id: int,
    name: str,
    checkpoint_id: int,
    change: Change,
    *,
    is_admin: bool = False,
    is_protected: bool | None = None,
) -> Alias:
    """Let the alias name this checkpoint of the run; make it if it is not there.

    ``change.expected_version`` is that of the alias; 0 is "not there". ``is_protected`` None leaves it; only
    an admin sets it, and moves what is protected. Raises `MissingError`, `ChangedError`, `ProtectedError`,
    and `StateError` for a checkpoint that is deleted or purged.
    """
    check_label("alias", name)
    row = lock_checkpoint(connection, checkpoint_id, change.visible)
    if row["run_id"] != run_id:
        raise MissingError("checkpoint", checkpoint_id)
    if row["state"] in ("deleted", "purged"):
        raise StateError(f"checkpoint {checkpoint_id} is {row['state']}", state=row["state"])
    present = _locked(connection, run_id, name)
    _check(present, name, change)
    was_protected = present is not None and present.is_protected
    wants_protection = is_protected is not None and is_protected != was_protected
    if not is_admin and (wants_protection or was_protected):
        raise ProtectedError(name)
    if present is not None and present.checkpoint_id == checkpoint_id and not wants_protection:
        return _alias(present)
    values: dict[str, Any] = {
        "checkpoint_id": checkpoint_id,
        "updated_seconds": change.at_seconds,
        "updated_by": change.actor[:128],
    }
    if is_protected is not None:
        values["is_protected"] = is_protected
    if present is None:
        connection.execute(insert(aliases).values(run_id=run_id, name=name, **values))
    else:
        named = update(aliases).where(aliases.c.run_id == run_id, aliases.c.name == name)
        connection.execute(named.values(**values, version=aliases.c.version + 1))
    for number in sorted({checkpoint_id, checkpoint_id if present is None else present.checkpoint_id}):
        bump(connection, number, change.at_seconds)
    _record(connection, "alias.set", name, row, change, before=present, after=checkpoint_id)
    return get_alias(connection, run_id, name)


def delete_alias(
    connection: Connection, run_id: int, name: str, change: Change, *, is_admin: bool = False
) -> None:
    """Remove an alias. Raises `MissingError`, `ChangedError` and `ProtectedError`."""
    get_alias(connection, run_id, name, change.visible)
    present = _locked(connection, run_id, name)
    if present is None:
        raise MissingError("alias", name)
    _check(present, name, change)
    if present.is_protected and not is_admin:
        raise ProtectedError(name)
    row = lock_checkpoint(connection, present.checkpoint_id)
    connection.execute(delete(aliases).where(aliases.c.run_id == run_id, aliases.c.name == name))
    bump(connection, present.checkpoint_id, change.at_seconds)
    _record(connection, "alias.delete", name, row, change, before=present, after=None)


def _select(visible: frozenset[str] | None) -> Select[Any]:
    query = select(aliases)
    if visible is None:
        return query
    return (
        query.join_from(aliases, runs, runs.c.id == aliases.c.run_id)
        .join(roots, roots.c.id == runs.c.root_id)
        .where(roots.c.name.in_(sorted(visible)))
    )


def _alias(row: Row[Any]) -> Alias:
    etag = f'"a{row.run_id}-{row.checkpoint_id}-{row.version}"'
    return record_of_row(Alias, row._mapping, etag=etag)


def _locked(connection: Connection, run_id: int, name: str) -> Row[Any] | None:
    query = _select(None).where(aliases.c.run_id == run_id, aliases.c.name == name).with_for_update()
    return connection.execute(query).first()


def _check(present: Row[Any] | None, name: str, change: Change) -> None:
    version = 0 if present is None else present.version
    if change.expected_version is not None and change.expected_version != version:
        raise ChangedError("alias", name, expected=change.expected_version, version=version)


def _record(
    connection: Connection,
    action: str,
    name: str,
    row: Mapping[Any, Any],
    change: Change,
    *,
    before: Row[Any] | None,
    after: int | None,
) -> None:
    detail = {
        "alias": name,
        "root": row["root"],
        "run": row["run"],
        "from": None if before is None else before.checkpoint_id,
        "to": after,
    }
    change.record(connection, action, f"run:{row['run_id']}", detail)
