"""Requests, promotions, and demotions, each in a transaction.

Changes of a run's stages and aliases are serialized (`dcp.server.catalog.labels.lock_aliases`). Requests
store marks of the content: a checkpoint saved again, or with dropped tensors, is not promoted by earlier
approvals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Connection, Row, delete, insert, select

from dcp.server.catalog import labels
from dcp.server.catalog.cursors import query_mark, read_page
from dcp.server.catalog.details import lock_checkpoint
from dcp.server.catalog.errors import MissingError, StateError
from dcp.server.catalog.events import checkpoint_event, emit_all
from dcp.server.catalog.runs import get_run
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import Precondition
from dcp.server.core.problems import ForbiddenError
from dcp.server.core.resource import Resource
from dcp.server.core.security.accounts import accounts_of
from dcp.server.core.security.keys import keys_of
from dcp.server.core.security.principal import Scope
from dcp.server.core.settings import Settings
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import checkpoints, roots, runs
from dcp.server.features.retention.deletion import is_pruned_now
from dcp.server.features.stages import feature
from dcp.server.features.stages.stage_records import (
    RequestState,
    Stage,
    StageAction,
    StageEntry,
    StageHolder,
    StageRequest,
)
from dcp.server.features.stages.stage_settings import StageRule, StagesSettings
from dcp.server.features.stages.stage_tables import stage_entries, stage_holders, stage_requests
from dcp.server.records.lists import Page

_MARKS: Final = ("save_id", "fingerprint", "content_digest", "structure_id")


class Rules:
    """Rules of stages for a caller, in one root or in any."""

    def __init__(self, ask: Ask, root: str | None = None) -> None:
        self._ask = ask
        self._caller = ask.caller
        self._root = root
        self.settings: StagesSettings = feature.options(ask.settings)
        self._is_keyless = ask.settings.auth == "off"

    @property
    def order(self) -> tuple[str, ...]:
        """The stages from the lowest to the highest."""
        return self.settings.order

    def rule(self, stage: str) -> StageRule:
        """Return the rule of a stage. A service without keys has a single caller, and needs no approvals."""
        found = self.settings.rule(stage)
        if not self._is_keyless:
            return found
        return found.model_copy(update={"approvals": 0, "requesters": (), "approvers": ()})

    def check_known(self, stage: str) -> None:
        """Raise MissingError for a stage missing in the settings."""
        if stage not in self.order:
            raise MissingError("stage", f"{stage!r} (stages: {', '.join(self.order)})")

    def may_request(self, stage: str) -> bool:
        """Return True if the caller may request promotions to the stage."""
        rule = self.rule(stage)
        return self._is_one_of(rule.requesters) if rule.requesters else self._may(rule.request_scope)

    def may_approve(self, stage: str) -> bool:
        """Return True if the caller may approve promotions to the stage."""
        rule = self.rule(stage)
        return self._is_one_of(rule.approvers) if rule.approvers else self._may(rule.approve_scope)

    def may_demote(self, stage: str) -> bool:
        """Return True if the caller may demote from the stage: approvers, or requesters of stages without
        approvals; admins for stages removed from the settings."""
        if stage not in self.order:
            return self._may("admin")
        return self.may_approve(stage) if self.rule(stage).approvals else self.may_request(stage)

    def _is_one_of(self, names: tuple[str, ...]) -> bool:
        own = {self._caller.name, self._caller.owner, self._caller.account}
        number = self._caller.account_id
        if number is not None and any(name.startswith("group:") for name in names):
            account = self._ask.find(accounts_of, [number])[number]
            own |= {f"group:{group}" for group in account.groups}
        return not own.isdisjoint(names)

    def _may(self, scope: Scope) -> bool:
        return self._caller.may(scope, self._root)

    def shown(self) -> list[Stage]:
        """List the stages."""
        return [
            Stage(
                name=name,
                may_request=self.may_request(name),
                may_approve=self.may_approve(name),
                **self.rule(name).model_dump(),
            )
            for name in self.order
        ]


# -- content -------------------------------------------------------------------------------------------------


def marks_of(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the marks of the content of a checkpoint."""
    return {name: row[name] for name in _MARKS}


def is_changed(before: Mapping[str, Any], row: Mapping[Any, Any]) -> bool:
    """Return True if the content differs from the marks.

    The id identifies a save, since later metrics change the fingerprint. Marks unknown at either time are
    ignored.
    """
    names = [name for name in _MARKS if name != "fingerprint" or before["save_id"] is None]
    return any(None not in (before[name], row[name]) and before[name] != row[name] for name in names)


# -- queries -------------------------------------------------------------------------------------------------

_SHOWN: Final = (
    checkpoints.c.key.label("checkpoint_key"),
    checkpoints.c.step,
    *(checkpoints.c[name] for name in _MARKS),
)
_QUERY: Final = (
    select(stage_requests, roots.c.name.label("root"), runs.c.key.label("run"), *_SHOWN)
    .join_from(stage_requests, checkpoints, checkpoints.c.id == stage_requests.c.checkpoint_id)
    .join(runs, runs.c.id == stage_requests.c.run_id)
    .join(roots, roots.c.id == runs.c.root_id)
)

REQUESTS: Final = Resource(
    stage_requests,
    what="stage request",
    noun="stage_request",
    tag="s{id}",
    record=lambda row, etag: record_of_row(
        StageRequest,
        row,
        approved_by=tuple(one["by"] for one in row.approvals),
        is_changed=is_changed(row.content, row._mapping),
        etag=etag,
    ),
    detail=lambda row: {
        "root": row.root,
        "run": row.run,
        "checkpoint": row.checkpoint_id,
        "stage": row.stage,
        "state": row.state,
    },
    query=_QUERY,
    is_visible=lambda row, visible: visible is None or row.root in visible,
    root=lambda row: row.root,
)


def list_requests(
    connection: Connection,
    visible: frozenset[str] | None,
    *,
    run_id: int | None = None,
    checkpoint_id: int | None = None,
    stage: str | None = None,
    state: RequestState | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[StageRequest]:
    """List visible requests, newest first."""
    query = _QUERY if visible is None else _QUERY.where(roots.c.name.in_(sorted(visible)))
    given = {"run_id": run_id, "checkpoint_id": checkpoint_id, "stage": stage, "state": state}
    for name, value in given.items():
        if value is not None:
            query = query.where(stage_requests.c[name] == value)
    mark = query_mark("stage-requests", *given.values())
    key = (stage_requests.c.id, int)
    return read_page(
        connection, query, REQUESTS.shown, mark, key, cursor=cursor, limit=limit, descending=True
    )


def holders_of(connection: Connection, run_id: int) -> dict[str, StageHolder]:
    """Return the checkpoints of a run in stages, by stage."""
    query = (
        select(stage_holders, *_SHOWN, checkpoints.c.state, checkpoints.c.verification)
        .join(checkpoints, checkpoints.c.id == stage_holders.c.checkpoint_id)
        .where(stage_holders.c.run_id == run_id)
        .order_by(stage_holders.c.stage)
    )
    return {
        row.stage: record_of_row(StageHolder, row, is_changed=is_changed(row.content, row._mapping))
        for row in connection.execute(query)
    }


def history_of(
    connection: Connection,
    run_id: int,
    visible: frozenset[str] | None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[StageEntry]:
    """List the history of a run, newest first. Raises MissingError."""
    get_run(connection, run_id, visible)
    query = (
        select(stage_entries, checkpoints.c.key.label("checkpoint_key"), checkpoints.c.step)
        .join(checkpoints, checkpoints.c.id == stage_entries.c.checkpoint_id)
        .where(stage_entries.c.run_id == run_id)
    )
    return read_page(
        connection,
        query,
        lambda row: record_of_row(StageEntry, row),
        f"stage-history-{run_id}",
        (stage_entries.c.id, int),
        cursor=cursor,
        limit=limit,
        descending=True,
    )


# -- aliases -------------------------------------------------------------------------------------------------


@feature.alias_guard
def why_held(connection: Connection, settings: Settings, run_id: int, name: str) -> str | None:
    """Explain why an alias cannot be set or removed by hand: a stage, in use or reserved."""
    options: StagesSettings = feature.options(settings)
    held = select(stage_holders.c.stage).where(
        stage_holders.c.run_id == run_id, stage_holders.c.stage == name
    )
    if connection.execute(held).first() is None and not (options.reserved and name in options.order):
        return None
    return f"alias {name!r} is a stage: request a promotion, or demote the checkpoint in the stage"


# -- changes -------------------------------------------------------------------------------------------------


def request_promotion(
    connection: Connection, ask: Ask, checkpoint_id: int, stage: str, reason: str | None, match: Precondition
) -> Row[Any]:
    """Request the promotion of a checkpoint; a stage without approvals promotes immediately.

    Raises MissingError; ForbiddenError; ChangedError; StateError for a duplicate request, or a checkpoint
    that cannot be promoted.
    """
    Rules(ask).check_known(stage)
    run_id = connection.execute(
        select(checkpoints.c.run_id).where(checkpoints.c.id == checkpoint_id)
    ).scalar()
    labels.lock_aliases(connection, run_id or 0)
    expected = match.version(f"c{checkpoint_id}")
    row = lock_checkpoint(connection, checkpoint_id, ask.visible, expected)
    rules = Rules(ask, row["root"])
    if not rules.may_request(stage):
        raise _forbidden("request a promotion to", stage, rules.rule(stage).request_scope)
    _check_promotable(connection, rules, row, stage)
    _close_outdated(connection, ask, rules, row, stage)
    values = {
        "run_id": row["run_id"],
        "checkpoint_id": checkpoint_id,
        "stage": stage,
        "state": "requested",
        "reason": reason,
        "content": marks_of(row),
        "approvals": [],
        "requested_by": ask.caller.name[:128],
        **_party(ask),
    }
    request = REQUESTS.insert(connection, ask, values)
    _note(connection, ask, request, "requested", reason)
    if not rules.rule(stage).approvals:
        return _promote(connection, ask, rules, request, "promote", [])
    _emit(connection, ask, "stage.requested", row, stage, request.id, reason)
    return request


def approve(
    connection: Connection, ask: Ask, number: int, reason: str | None, match: Precondition
) -> Row[Any]:
    """Approve a request; the last required approval promotes the checkpoint.

    Raises MissingError, ChangedError; ForbiddenError for a caller without the right, or the requester;
    StateError for a closed request, a second approval by the caller, or a checkpoint that has changed or
    cannot be promoted.
    """
    rules, request = _locked(connection, ask, number, match)
    rule = rules.rule(request.stage)
    if not rules.may_approve(request.stage):
        raise _forbidden("approve a promotion to", request.stage, rule.approve_scope)
    party, before = _party(ask), _standing(connection, request.approvals)
    if _is_same(party, request._mapping) and not rule.self_approval:
        raise ForbiddenError(f"stage {request.stage!r} needs the approval of another account or key")
    if any(_is_same(party, one) for one in before):
        raise StateError("you have already approved this request", state="approved")
    row = lock_checkpoint(connection, request.checkpoint_id, ask.visible)
    _check_promotable(connection, rules, row, request.stage, request.content)
    approvals = [*before, {"by": ask.caller.name[:128], "key_id": ask.caller.key_id, **party}]
    _note(connection, ask, request, "approved", reason)
    if len(approvals) < rule.approvals:
        return REQUESTS.update(connection, ask, request, {"approvals": approvals}, "approve")
    return _promote(connection, ask, rules, request, "approve", approvals)


def reject(connection: Connection, ask: Ask, number: int, reason: str, match: Precondition) -> Row[Any]:
    """Reject a request. Raises as `approve`."""
    rules, request = _locked(connection, ask, number, match)
    if not rules.may_approve(request.stage):
        raise _forbidden("reject a promotion to", request.stage, rules.rule(request.stage).approve_scope)
    found = _close(connection, ask, request, "rejected", "reject", reason)
    row = lock_checkpoint(connection, request.checkpoint_id, ask.visible)
    _emit(connection, ask, "stage.rejected", row, request.stage, request.id, reason)
    return found


def withdraw(
    connection: Connection, ask: Ask, number: int, reason: str | None, match: Precondition
) -> Row[Any]:
    """Withdraw an own request; admins can withdraw any. Raises as `approve`."""
    _, request = _locked(connection, ask, number, match)
    if ask.caller.owner[:256] != request.owner and not ask.caller.may("admin", request.root):
        raise ForbiddenError(f"only {request.requested_by} and admins may withdraw request {number}")
    return _close(connection, ask, request, "withdrawn", "withdraw", reason)


def demote(
    connection: Connection, ask: Ask, run_id: int, stage: str, checkpoint_id: int, reason: str | None
) -> None:
    """Take a checkpoint out of a stage, and remove the alias. Raises MissingError if the stage has another
    checkpoint."""
    get_run(connection, run_id, ask.visible)
    labels.lock_aliases(connection, run_id)
    holder = holders_of(connection, run_id).get(stage)
    if holder is None or holder.checkpoint_id != checkpoint_id:
        raise MissingError("checkpoint in stage", f"{stage!r} with the id {checkpoint_id}")
    rules = Rules(ask, get_run(connection, run_id, ask.visible).root)
    if not rules.may_demote(stage):
        raise _forbidden("demote from", stage, "admin")
    row = lock_checkpoint(connection, checkpoint_id, ask.visible)
    _leave(connection, ask, run_id, stage)
    _enter(connection, ask, run_id, checkpoint_id, stage, holder.request_id, "demoted", reason)
    detail = {"root": row["root"], "run": row["run"], "checkpoint": checkpoint_id, "stage": stage}
    ask.change().record(connection, "stage.demote", f"run:{run_id}", detail)
    _emit(connection, ask, "stage.demoted", row, stage, holder.request_id, reason)


def may_decide(connection: Connection, ask: Ask, number: int) -> dict[str, bool]:
    """Return the caller's options for an open request: approve, reject, withdraw."""
    request = REQUESTS.find(connection, number, ask.visible)
    rules, party = Rules(ask, request.root), _party(ask)
    is_open = (
        request.state == "requested"
        and not _has_expired(rules, request, ask.now)
        and request.stage in rules.order
        and ask.caller.may("write", request.root)
    )
    may = is_open and rules.may_approve(request.stage)
    is_other = not _is_same(party, request._mapping) or rules.rule(request.stage).self_approval
    is_first = not any(_is_same(party, one) for one in _standing(connection, request.approvals))
    has_changed = is_changed(request.content, request._mapping)
    return {
        "approve": may and is_other and is_first and not has_changed,
        "reject": may,
        "withdraw": is_open and (party["owner"] == request.owner or ask.caller.may("admin", request.root)),
    }


def _party(ask: Ask) -> dict[str, str | None]:
    """Return the requester or approver: the account or key, and the maker of the key."""
    return {"owner": ask.caller.owner[:256], "maker": ask.caller.maker}


def _is_same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Return True if the same account or key is behind both: a key counts for its maker, and keys made by an
    account count for the account. Keys made by another key are different."""
    if one["owner"] in (other["owner"], other["maker"]) or one["maker"] == other["owner"]:
        return True
    return one["maker"] == other["maker"] and (one["maker"] or "").startswith("account#")


def _standing(connection: Connection, approvals: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the approvals that count: of active keys and accounts."""
    keys = keys_of(connection, [one["key_id"] for one in approvals if one["key_id"] is not None])
    revoked = {f"key#{key.id}" for key in keys.values() if key.revoked_at is not None}
    numbers = [one["owner"].removeprefix("account#") for one in approvals]
    found = accounts_of(connection, [int(number) for number in numbers if number.isdecimal()])
    ended = revoked | {f"account#{row.id}" for row in found.values() if row.disabled_seconds is not None}
    return [one for one in approvals if ended.isdisjoint((one["owner"], f"key#{one['key_id']}"))]


def _locked(connection: Connection, ask: Ask, number: int, match: Precondition) -> tuple[Rules, Row[Any]]:
    """Return the rules and an open request, locked after its run like all changes."""
    labels.lock_aliases(connection, REQUESTS.find(connection, number, ask.visible).run_id)
    request = REQUESTS.lock(connection, ask, number, match)
    rules = Rules(ask, request.root)
    if request.state != "requested":
        raise StateError(f"request {number} is {request.state}", state=request.state)
    if _has_expired(rules, request, ask.now):
        raise StateError(f"request {number} has expired: request the promotion again", state="expired")
    rules.check_known(request.stage)
    return rules, request


def _has_expired(rules: Rules, request: Row[Any], now: float) -> bool:
    """Return True for an expired request, also before the next run of `expiry`."""
    before = rules.settings.expired_before(now)
    return before is not None and request.created_seconds < before


def _check_promotable(
    connection: Connection,
    rules: Rules,
    row: Mapping[Any, Any],
    stage: str,
    content: Mapping[str, Any] | None = None,
) -> None:
    """Raise StateError if the checkpoint cannot be promoted to the stage, or differs from the requested
    ``content``."""
    number, rule = row["id"], rules.rule(stage)
    if row["state"] != "committed":
        raise StateError(f"checkpoint {number} is {row['state']}", state=row["state"])
    if is_pruned_now(connection, number):
        raise StateError(f"a job drops parts of checkpoint {number}: wait for the job to end", state="pruned")
    if content is not None and is_changed(content, row):
        why = f"checkpoint {number} has changed since the request: reject it, and request the promotion again"
        raise StateError(why, state="changed")
    if rule.requires_verified and row["verification"] != "good":
        why = f"stage {stage!r} needs verified checkpoints, and {number} is {row['verification']}: verify it"
        raise StateError(why, state=row["verification"])
    holders = holders_of(connection, row["run_id"])
    own = [name for name, one in holders.items() if one.checkpoint_id == number]
    place = rules.order.index(stage)
    for name in own:
        if name == stage and not holders[name].is_changed:
            raise StateError(f"checkpoint {number} is already in stage {stage!r}", state=stage)
        if name not in rules.order or rules.order.index(name) > place:
            raise StateError(
                f"checkpoint {number} is in stage {name!r}: demote the checkpoint first", state=name
            )
    if rule.requires_previous and place and rules.order[place - 1] not in own:
        before = rules.order[place - 1]
        raise StateError(
            f"checkpoint {number} must be in stage {before!r} before stage {stage!r}", state="early"
        )


def _close_outdated(
    connection: Connection, ask: Ask, rules: Rules, row: Mapping[Any, Any], stage: str
) -> None:
    """Close an open request for an earlier content, or an expired request. Raises StateError for another open
    request."""
    query = _QUERY.where(
        stage_requests.c.checkpoint_id == row["id"],
        stage_requests.c.stage == stage,
        stage_requests.c.state == "requested",
    )
    for request in connection.execute(query).all():
        if _has_expired(rules, request, ask.now):
            _close(connection, ask, request, "expired", "expire", None)
            continue
        if not is_changed(request.content, row):
            why = f"request {request.id} for stage {stage!r} is already open"
            raise StateError(why, state="requested")
        _close(connection, ask, request, "outdated", "outdate", None)


def _close(
    connection: Connection, ask: Ask, request: Row[Any], state: RequestState, action: str, reason: str | None
) -> Row[Any]:
    _note(connection, ask, request, state, reason)
    return REQUESTS.update(connection, ask, request, {"state": state}, action)


def _promote(
    connection: Connection, ask: Ask, rules: Rules, request: Row[Any], action: str, approvals: list[Any]
) -> Row[Any]:
    """Set the alias, and record the previous and new checkpoint of the stage. The checkpoint is locked and
    checked."""
    run_id, number, stage = request.run_id, request.checkpoint_id, request.stage
    holders = holders_of(connection, run_id)
    for name, holder in holders.items():
        if holder.checkpoint_id == number and name != stage:
            _leave(connection, ask, run_id, name)
            _enter(connection, ask, run_id, number, name, request.id, "moved", None)
    if stage in holders:
        before = holders[stage].checkpoint_id
        _enter(connection, ask, run_id, before, stage, request.id, "replaced", None)
        connection.execute(
            delete(stage_holders).where(stage_holders.c.run_id == run_id, stage_holders.c.stage == stage)
        )
    content = marks_of(lock_checkpoint(connection, number))
    change = ask.change()
    labels.set_alias(connection, run_id, stage, number, change, is_admin=True, is_protected=True)
    connection.execute(
        insert(stage_holders).values(
            run_id=run_id,
            stage=stage,
            checkpoint_id=number,
            request_id=request.id,
            content=content,
            promoted_by=ask.caller.name[:128],
            promoted_seconds=ask.now,
        )
    )
    _note(connection, ask, request, "promoted", None)
    values = {"state": "promoted", "approvals": approvals}
    found = REQUESTS.update(connection, ask, request, values, action)
    row = lock_checkpoint(connection, number)
    _emit(connection, ask, "stage.promoted", row, stage, request.id, request.reason)
    return found


def _leave(connection: Connection, ask: Ask, run_id: int, stage: str) -> None:
    """Remove the holder and the alias of a stage."""
    connection.execute(
        delete(stage_holders).where(stage_holders.c.run_id == run_id, stage_holders.c.stage == stage)
    )
    with suppress(MissingError):
        labels.delete_alias(connection, run_id, stage, ask.change(), is_admin=True)


def _note(
    connection: Connection, ask: Ask, request: Row[Any], action: StageAction, reason: str | None
) -> None:
    _enter(connection, ask, request.run_id, request.checkpoint_id, request.stage, request.id, action, reason)


def _enter(
    connection: Connection,
    ask: Ask,
    run_id: int,
    checkpoint_id: int,
    stage: str,
    request_id: int,
    action: StageAction,
    reason: str | None,
) -> None:
    """Add a line to the history."""
    connection.execute(
        insert(stage_entries).values(
            run_id=run_id,
            checkpoint_id=checkpoint_id,
            request_id=request_id,
            stage=stage,
            action=action,
            by=ask.caller.name[:128],
            reason=reason,
            at_seconds=ask.now,
        )
    )


def _emit(
    connection: Connection,
    ask: Ask,
    kind: str,
    row: Mapping[Any, Any],
    stage: str,
    request_id: int,
    reason: str | None,
) -> None:
    said = {"stage": stage, "request_id": request_id, "by": ask.caller.name, "reason": reason}
    emit_all(connection, [checkpoint_event(kind, row, **said)], now=ask.now)


def _forbidden(act: str, stage: str, scope: str) -> ForbiddenError:
    return ForbiddenError(
        f"you may not {act} stage {stage!r}: see GET /api/v1/stages for the allowed callers", scope=scope
    )
