"""Retention policies as rows: what is kept of which runs, how often that is applied, with how much grace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from dcp.manager.retention import Retention
from dcp.server.catalog.errors import ChangedError, MissingError, StateError
from dcp.server.catalog.patterns import check_pattern
from dcp.server.catalog.roots import root_id
from dcp.server.database.tables import retention_policies as table
from dcp.server.database.tables import roots, schedules

__all__ = [
    "NewPolicy",
    "Policy",
    "create_policy",
    "delete_policy",
    "get_policy",
    "list_policies",
    "update_policy",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPolicy:
    """A policy. ``keep`` is what `Retention.to_dict` gives."""

    name: str
    root: str
    run_glob: str
    keep: Mapping[str, Any]
    grace_seconds: float
    interval_seconds: float
    is_enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(NewPolicy):
    """A stored one."""

    id: int
    version: int
    created_seconds: float
    updated_seconds: float

    @property
    def retention(self) -> Retention:
        """The rules."""
        return Retention.from_dict(self.keep)

    @property
    def etag(self) -> str:
        """The entity tag, with quotes."""
        return f'"p{self.id}-{self.version}"'


def create_policy(connection: Connection, new: NewPolicy, now: float) -> Policy:
    """Store it. Raises MissingError for the root, StateError if there is one of its name."""
    check_pattern("run_glob", new.run_glob)
    values = _columns(new) | {"root_id": root_id(connection, new.root)}
    _refuse_name(connection, new.name, None)
    try:
        number = connection.execute(
            insert(table).values(**values, created_seconds=now, updated_seconds=now).returning(table.c.id)
        ).scalar_one()
    except IntegrityError as error:  # made in this instant
        raise _taken(new.name) from error
    return get_policy(connection, int(number))


def get_policy(connection: Connection, policy_id: int, visible: frozenset[str] | None = None) -> Policy:
    """One; MissingError if there is none that may be seen."""
    row = connection.execute(_select(visible).where(table.c.id == policy_id)).mappings().one_or_none()
    if row is None:
        raise MissingError("retention policy", policy_id)
    return Policy(**row)


def list_policies(
    connection: Connection,
    visible: frozenset[str] | None = None,
    *,
    after: int = 0,
    limit: int | None = None,
    is_enabled: bool | None = None,
) -> list[Policy]:
    """Those that may be seen, by id."""
    query = _select(visible).where(table.c.id > after).order_by(table.c.id).limit(limit)
    if is_enabled is not None:
        query = query.where(table.c.is_enabled == is_enabled)
    return [Policy(**row) for row in connection.execute(query).mappings()]


def update_policy(
    connection: Connection,
    policy_id: int,
    changes: Mapping[str, Any],
    now: float,
    *,
    expected_version: int | None = None,
    visible: frozenset[str] | None = None,
) -> Policy:
    """Change the fields named. Raises MissingError, ChangedError, StateError as `create_policy`."""
    _lock(connection, policy_id, expected_version, visible)
    if "run_glob" in changes:
        check_pattern("run_glob", changes["run_glob"])
    if "name" in changes:
        _refuse_name(connection, changes["name"], policy_id)
    values = dict(changes) | {"version": table.c.version + 1, "updated_seconds": now}
    try:
        connection.execute(update(table).where(table.c.id == policy_id).values(**values))
    except IntegrityError as error:
        raise _taken(str(changes.get("name"))) from error
    return get_policy(connection, policy_id)


def delete_policy(
    connection: Connection,
    policy_id: int,
    *,
    expected_version: int | None = None,
    visible: frozenset[str] | None = None,
) -> Policy:
    """Remove it; what it has deleted stays so."""
    policy = _lock(connection, policy_id, expected_version, visible)
    connection.execute(delete(schedules).where(schedules.c.name == f"retention:{policy_id}"))
    connection.execute(delete(table).where(table.c.id == policy_id))
    return policy


def _lock(
    connection: Connection, policy_id: int, expected_version: int | None, visible: frozenset[str] | None
) -> Policy:
    connection.execute(select(table.c.id).where(table.c.id == policy_id).with_for_update())
    policy = get_policy(connection, policy_id, visible)
    if expected_version is not None and policy.version != expected_version:
        raise ChangedError("retention policy", policy_id, expected=expected_version, version=policy.version)
    return policy


def _select(visible: frozenset[str] | None) -> Select[Any]:
    names = (
        "id",
        "name",
        "is_enabled",
        "run_glob",
        "keep",
        "grace_seconds",
        "interval_seconds",
        "version",
        "created_seconds",
        "updated_seconds",
    )
    query = select(*(table.c[name] for name in names), roots.c.name.label("root")).join_from(
        table, roots, roots.c.id == table.c.root_id
    )
    return query if visible is None else query.where(roots.c.name.in_(sorted(visible)))


def _columns(new: NewPolicy) -> dict[str, Any]:
    return {
        "name": new.name,
        "is_enabled": new.is_enabled,
        "run_glob": new.run_glob,
        "keep": dict(new.keep),
        "grace_seconds": new.grace_seconds,
        "interval_seconds": new.interval_seconds,
    }


def _refuse_name(connection: Connection, name: str, own: int | None) -> None:
    found = connection.execute(select(table.c.id).where(table.c.name == name)).scalar()
    if found is not None and found != own:
        raise _taken(name)


def _taken(name: str) -> StateError:
    return StateError(f"there is a retention policy {name!r} already", state="exists")
