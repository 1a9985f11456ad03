"""``/rules``: what is done by itself when checkpoints are committed, verified or tagged. Only for admins."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Response
from sqlalchemy import Connection

from dcp.server.catalog.cursors import decode_cursor, encode_cursor
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import Author, IfMatch, Page, ServiceDep, Writer, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.http.routers import api_router
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.rules import rules
from dcp.server.features.rules.actions import Action, Condition, ConvertAction
from dcp.server.features.rules.answers import RuleAnswer, RuleChange, RulePage, RuleRequest
from dcp.server.features.rules.rules import RuleRow

__all__ = ["router"]

router = api_router("/rules", tags=["rules"], dependencies=[requires("admin", all_roots=True)])

_CURSOR = "rules"


@router.post("", status_code=201, responses=problems(409))
def create_rule(
    body: RuleRequest, service: ServiceDep, author: Author, transact: IdempotentDep, response: Response
) -> RuleAnswer:
    """Make a rule, for what happens from now on."""
    _check_roots(service, body.condition, body.actions)

    def act(connection: Connection) -> RuleAnswer:
        rule = rules.create_rule(connection, body.rule(), author.now_seconds)
        _note(connection, author, "rule.create", rule)
        response.headers["Location"] = f"/api/v1/rules/{rule.id}"
        response.headers["ETag"] = rule.etag
        return RuleAnswer.of(rule)

    return transact(act)


@router.get("")
def list_rules(service: ServiceDep, page: Page) -> RulePage:
    """All rules, by id."""
    after = 0 if page.cursor is None else decode_cursor(page.cursor, _CURSOR, int)[0]
    with service.database.read() as connection:
        found = rules.list_rules(connection, after=after, limit=page.limit + 1)
    shown = found[: page.limit]
    more = encode_cursor(_CURSOR, shown[-1].id) if len(found) > page.limit else None
    return RulePage(items=[RuleAnswer.of(rule) for rule in shown], next_cursor=more)


@router.get("/{rule_id}", responses=problems(404))
def get_rule(rule_id: IdPath, service: ServiceDep, response: Response) -> RuleAnswer:
    """One rule."""
    with service.database.read() as connection:
        rule = rules.get_rule(connection, rule_id)
    response.headers["ETag"] = rule.etag
    return RuleAnswer.of(rule)


@router.patch("/{rule_id}", responses=problems(404, 409, 412))
def change_rule(
    rule_id: IdPath,
    body: RuleChange,
    service: ServiceDep,
    author: Author,
    if_match: IfMatch,
    response: Response,
) -> RuleAnswer:
    """Change what is given, for what happens from now on."""
    _check_roots(service, body.condition, body.actions or ())
    expected = if_match.version(f"r{rule_id}")

    def act(connection: Connection) -> RuleRow:
        rule = rules.update_rule(
            connection, rule_id, body.values(), author.now_seconds, expected_version=expected
        )
        _note(connection, author, "rule.change", rule)
        return rule

    rule = service.database.transact(act)
    response.headers["ETag"] = rule.etag
    return RuleAnswer.of(rule)


@router.delete("/{rule_id}", status_code=204, responses=problems(404, 412))
def delete_rule(rule_id: IdPath, service: ServiceDep, author: Author, if_match: IfMatch) -> None:
    """Remove it. Jobs that it has made go on."""
    expected = if_match.version(f"r{rule_id}")

    def act(connection: Connection) -> None:
        rule = rules.delete_rule(connection, rule_id, expected_version=expected)
        _note(connection, author, "rule.delete", rule)

    service.database.transact(act)


def _check_roots(service: Service, condition: Condition | None, actions: Iterable[Action]) -> None:
    """What is a typing error now would be a refusal at each event."""
    known = service.settings.roots
    wanted = [action.target_root for action in actions if isinstance(action, ConvertAction)]
    for name in [None if condition is None else condition.root, *wanted]:
        if name is not None and name not in known:
            raise UnprocessableError(f"there is no root {name!r}")
    for name in wanted:
        if name is not None and known[name].readonly:
            raise UnprocessableError(f"root {name} is read-only")


def _note(connection: Connection, author: Writer, action: str, rule: RuleRow) -> None:
    detail = {"name": rule.name, "event": rule.event, "actions": [one.kind for one in rule.actions]}
    author.change(None).record(connection, action, f"rule:{rule.id}", detail)
