"""``/rules``: operations for admins."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field
from sqlalchemy import Connection, Row

from dcp.server.catalog.inputs import Name, Request
from dcp.server.catalog.names import check_pattern
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import IfMatch, PageQuery
from dcp.server.core.problems import ForbiddenError, UnprocessableError
from dcp.server.features.rules import (
    RULES,
    Action,
    Condition,
    ConvertAction,
    Rule,
    RuleEvent,
    feature,
    is_within,
)
from dcp.server.records.lists import Page

_ADMIN: Final[dict[str, Any]] = {"tag": "rules", "scope": "admin"}


class RuleRequest(Request):
    """Rule: on an event, submit these jobs for checkpoints that meet the condition."""

    name: Name
    event: RuleEvent = "checkpoint.committed"
    condition: Condition = Condition()
    actions: list[Action] = Field(min_length=1, max_length=8)
    is_enabled: bool = True


class RuleChange(Request):
    """The fields to change."""

    name: Name | None = None
    event: RuleEvent | None = None
    condition: Condition | None = None
    actions: list[Action] | None = Field(default=None, min_length=1, max_length=8)
    is_enabled: bool | None = None


@feature.post("/rules", **_ADMIN, status=201, errors=(409,))
def create_rule(body: RuleRequest, ask: Ask) -> Rule:
    """Create a rule, for events from now on."""
    values = _values(body, ask)
    _check_own(values["condition"], values["actions"], ask)
    return RULES.create(ask, values)


@feature.get("/rules", **_ADMIN, errors=())
def list_rules(ask: Ask, page: PageQuery) -> Page[Rule]:
    """List the rules by id; a key for some roots lists rules of these roots."""
    return RULES.page(ask, page)


@feature.get("/rules/{rule_id}", **_ADMIN)
def get_rule(rule_id: IdPath, ask: Ask) -> Rule:
    """Get a rule."""
    return RULES.read(ask, rule_id)


@feature.patch("/rules/{rule_id}", **_ADMIN, errors=(404, 409, 412))
def change_rule(rule_id: IdPath, body: RuleChange, ask: Ask, match: IfMatch) -> Rule:
    """Change the given fields, for events from now on."""
    values = _values(body, ask)

    def act(connection: Connection) -> Row[Any]:
        row = RULES.lock(connection, ask, rule_id, match)
        _check_own(values.get("condition", row.condition), values.get("actions", row.actions), ask)
        return RULES.update(connection, ask, row, values)

    return RULES.answer(ask, ask.transact(act))


@feature.delete("/rules/{rule_id}", **_ADMIN, status=204, errors=(404, 412))
def delete_rule(rule_id: IdPath, ask: Ask, match: IfMatch) -> None:
    """Delete a rule. Running jobs continue."""
    RULES.delete(ask, rule_id, match)


def _values(body: RuleRequest | RuleChange, ask: Ask) -> dict[str, Any]:
    """Validate the given fields, to report errors before the first event, and return their columns."""
    _check_roots(body, ask)
    values = {name: value for name, value in body if value is not None} | {"maker": ask.caller.answerable}
    if body.condition is not None:
        if body.condition.run is not None:
            check_pattern("condition.run", body.condition.run)
        values["condition"] = body.condition.model_dump(mode="json", exclude_none=True)
    if body.actions is not None:
        values["actions"] = [one.model_dump(mode="json", exclude_unset=True) for one in body.actions]
    return values


def _check_own(condition: dict[str, Any], actions: list[dict[str, Any]], ask: Ask) -> None:
    """Raise ForbiddenError for a rule that reads or writes roots not administered by the caller."""
    if not is_within(condition, actions, ask.visible):
        raise ForbiddenError(
            "the scope 'admin' for all roots is required, unless condition.root names a root and the actions "
            "name no other root",
            scope="admin",
        )


def _check_roots(body: RuleRequest | RuleChange, ask: Ask) -> None:
    known = ask.settings.roots
    source = None if body.condition is None else body.condition.root
    targets = [one.target_root for one in body.actions or () if isinstance(one, ConvertAction)]
    for name in [source, *targets]:
        if name is not None and name not in known:
            raise UnprocessableError(f"root {name!r} not found")
    for name in targets:
        if name is not None and known[name].readonly:
            raise UnprocessableError(f"root {name} is read-only")
