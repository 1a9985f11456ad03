"""Automation rules as rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter
from sqlalchemy import Connection, delete, select

from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.named import NamedRows
from dcp.server.catalog.names import check_pattern
from dcp.server.database.tables import rules as table
from dcp.server.features.rules.actions import Action, Condition

__all__ = ["NewRule", "RuleRow", "create_rule", "delete_rule", "get_rule", "list_rules", "update_rule"]

_ROWS: Final = NamedRows(table, "rule")
_ACTIONS: Final[TypeAdapter[tuple[Action, ...]]] = TypeAdapter(tuple[Action, ...])
_NAMES: Final = (
    "id",
    "name",
    "is_enabled",
    "event",
    "condition",
    "actions",
    "version",
    "created_seconds",
    "updated_seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRule:
    """A rule: on ``event``, for checkpoints of the ``condition``, these ``actions``."""

    name: str
    is_enabled: bool
    event: str
    condition: Condition
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow(NewRule):
    """A stored one. Events from before it was made, or changed last, do not concern it."""

    id: int
    version: int
    created_seconds: float
    updated_seconds: float

    @property
    def etag(self) -> str:
        """The entity tag, with quotes."""
        return f'"r{self.id}-{self.version}"'


def create_rule(connection: Connection, new: NewRule, now: float) -> RuleRow:
    """Store it; StateError if there is one of its name, InvalidQueryError for a glob that cannot be meant."""
    values = _columns(
        {
            "name": new.name,
            "is_enabled": new.is_enabled,
            "event": new.event,
            "condition": new.condition,
            "actions": new.actions,
        }
    )
    return get_rule(connection, _ROWS.insert(connection, values, now))


def get_rule(connection: Connection, rule_id: int) -> RuleRow:
    """One; MissingError if there is none."""
    row = connection.execute(select(table).where(table.c.id == rule_id)).mappings().one_or_none()
    if row is None:
        raise MissingError(_ROWS.what, rule_id)
    return _rule(row)


def list_rules(
    connection: Connection, *, after: int = 0, limit: int | None = None, is_enabled: bool | None = None
) -> list[RuleRow]:
    """The rules by id."""
    query = select(table).where(table.c.id > after).order_by(table.c.id).limit(limit)
    if is_enabled is not None:
        query = query.where(table.c.is_enabled == is_enabled)
    return [_rule(row) for row in connection.execute(query).mappings()]


def update_rule(
    connection: Connection,
    rule_id: int,
    changes: Mapping[str, Any],
    now: float,
    *,
    expected_version: int | None = None,
) -> RuleRow:
    """Change the fields named, of `NewRule`. Raises MissingError, ChangedError, and as `create_rule`."""
    _lock(connection, rule_id, expected_version)
    _ROWS.update(connection, rule_id, _columns(changes), now)
    return get_rule(connection, rule_id)


def delete_rule(connection: Connection, rule_id: int, *, expected_version: int | None = None) -> RuleRow:
    """Remove it; jobs that it has made go on."""
    rule = _lock(connection, rule_id, expected_version)
    connection.execute(delete(table).where(table.c.id == rule_id))
    return rule


def _lock(connection: Connection, rule_id: int, expected_version: int | None) -> RuleRow:
    _ROWS.lock(connection, rule_id)
    rule = get_rule(connection, rule_id)
    _ROWS.expect(rule_id, rule.version, expected_version)
    return rule


def _rule(row: Mapping[Any, Any]) -> RuleRow:
    values = {name: row[name] for name in _NAMES}
    values["condition"] = Condition.model_validate(row["condition"])
    values["actions"] = _ACTIONS.validate_python(row["actions"], strict=False)
    return RuleRow(**values)


def _columns(values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    if "condition" in found:
        if found["condition"].run is not None:
            check_pattern("condition.run", found["condition"].run)
        found["condition"] = found["condition"].model_dump(mode="json", exclude_none=True)
    if "actions" in found:
        found["actions"] = [action.model_dump(mode="json", exclude_unset=True) for action in found["actions"]]
    return found
