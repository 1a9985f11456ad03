"""Retention policies as rows: what is kept of which runs, how often that is applied, with how much grace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, delete, select

from dcp.manager.retention import Retention
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.named import NamedRows
from dcp.server.catalog.names import check_pattern
from dcp.server.catalog.roots import root_id
from dcp.server.database.tables import retention_policies as table
from dcp.server.database.tables import roots, schedules

__all__ = [
    "NewPolicy",
    "PolicyRow",
    "create_policy",
    "delete_policy",
    "get_policy",
    "list_policies",
    "update_policy",
]

_ROWS: Final = NamedRows(table, "retention policy")


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
class PolicyRow(NewPolicy):
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


def create_policy(connection: Connection, new: NewPolicy, now: float) -> PolicyRow:
    """Store it. Raises MissingError for the root, StateError if there is one of its name."""
    check_pattern("run_glob", new.run_glob)
    values = _columns(new) | {"root_id": root_id(connection, new.root)}
    return get_policy(connection, _ROWS.insert(connection, values, now))


def get_policy(connection: Connection, policy_id: int, visible: frozenset[str] | None = None) -> PolicyRow:
    """One; MissingError if there is none that may be seen."""
    row = connection.execute(_select(visible).where(table.c.id == policy_id)).mappings().one_or_none()
    if row is None:
        raise MissingError(_ROWS.what, policy_id)
    return PolicyRow(**row)


def list_policies(
    connection: Connection,
    visible: frozenset[str] | None = None,
    *,
    after: int = 0,
    limit: int | None = None,
    is_enabled: bool | None = None,
) -> list[PolicyRow]:
    """The policies that may be seen, by id."""
    query = _select(visible).where(table.c.id > after).order_by(table.c.id).limit(limit)
    if is_enabled is not None:
        query = query.where(table.c.is_enabled == is_enabled)
    return [PolicyRow(**row) for row in connection.execute(query).mappings()]


def update_policy(
    connection: Connection,
    policy_id: int,
    changes: Mapping[str, Any],
    now: float,
    *,
    expected_version: int | None = None,
    visible: frozenset[str] | None = None,
) -> PolicyRow:
    """Change the fields named. Raises MissingError, ChangedError, StateError as `create_policy`."""
    _lock(connection, policy_id, expected_version, visible)
    if "run_glob" in changes:
        check_pattern("run_glob", changes["run_glob"])
    _ROWS.update(connection, policy_id, changes, now)
    return get_policy(connection, policy_id)


def delete_policy(
    connection: Connection,
    policy_id: int,
    *,
    expected_version: int | None = None,
    visible: frozenset[str] | None = None,
) -> PolicyRow:
    """Remove it; what it has deleted stays so."""
    policy = _lock(connection, policy_id, expected_version, visible)
    connection.execute(delete(schedules).where(schedules.c.name == f"retention:{policy_id}"))
    connection.execute(delete(table).where(table.c.id == policy_id))
    return policy


def _lock(
    connection: Connection, policy_id: int, expected_version: int | None, visible: frozenset[str] | None
) -> PolicyRow:
    _ROWS.lock(connection, policy_id)
    policy = get_policy(connection, policy_id, visible)
    _ROWS.expect(policy_id, policy.version, expected_version)
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
