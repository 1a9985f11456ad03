"""Rules: jobs submitted automatically when checkpoints are committed, verified or tagged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from sqlalchemy import Boolean, Column, Connection, Row, String, literal, select, true, update

from dcp.server.catalog import audit
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import CatalogError, MissingError
from dcp.server.catalog.events import CatalogEvent
from dcp.server.catalog.inputs import Name, SourceFormat
from dcp.server.catalog.names import matches
from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import Parameters, PlainText
from dcp.server.core.jobs.ledger.transitions import submit_or_join
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.problems import ProblemError
from dcp.server.core.resource import Resource
from dcp.server.core.security.accounts import NOT_ADMIN, without_scope
from dcp.server.core.security.principal import ALL_SCOPES, SYSTEM, Principal
from dcp.server.database.mapping import JSON_DOCUMENT, record_of_row
from dcp.server.database.tables import jobs, lineage, resource_table
from dcp.server.features import kinds, role_settings
from dcp.server.features.convert.conversion import target_dedup_key
from dcp.server.features.convert.options import ConvertOptions, ConvertParams
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.declaring import Shown

__all__ = [
    "ACTIONS",
    "RULES",
    "Action",
    "Condition",
    "ConvertAction",
    "Rule",
    "RuleEvent",
    "StatsAction",
    "VerifyAction",
    "feature",
    "is_within",
]


feature: Final = Feature("rules", __name__, web=["rule_routes"])

RuleEvent = Literal["checkpoint.committed", "checkpoint.verified", "checkpoint.tagged"]

_FIELD: Final = re.compile(r"\{([^{}]*)\}")
_EXAMPLE: Final = {"root": "r", "run": "a/b", "name": "step-1", "stem": "step-1", "step": 1, "id": 1}


def is_within(
    condition: Mapping[str, Any], actions: Iterable[Mapping[str, Any]], visible: frozenset[str] | None
) -> bool:
    """Return True if a rule reads and writes in ``visible`` roots only."""
    roots = _roots(condition, actions)
    return visible is None or (roots is not None and visible.issuperset(roots))


def _roots(condition: Mapping[str, Any], actions: Iterable[Mapping[str, Any]]) -> set[str] | None:
    """Return the roots in which a rule reads and writes; None for all."""
    named = {action.get(name) for action in actions for name in ("target_root", "hf_root")} - {None}
    return None if condition.get("root") is None else {condition["root"], *map(str, named)}


def _roots_of(rule: Row[Any]) -> set[str] | None:
    return _roots(rule.condition, rule.actions)


rules: Final = resource_table(
    "automation_rules",
    Column("name", String(128), nullable=False, unique=True),
    Column("is_enabled", Boolean, nullable=False, server_default=true()),
    Column("event", String(64), nullable=False),
    Column("condition", JSON_DOCUMENT, nullable=False),  # root, run glob, tag, format, every n steps
    Column("actions", JSON_DOCUMENT, nullable=False),  # jobs to make
    Column("maker", String(256)),  # `Principal.answerable` of the last admin to change the rule
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule: submit jobs (``actions``) on ``event`` for checkpoints that meet ``condition``."""

    id: int
    name: str
    event: Annotated[str, Shown("Event that starts the jobs.")]
    condition: Annotated[Mapping[str, Any], Shown("As in the request.")]
    actions: Annotated[tuple[Mapping[str, Any], ...], Shown("As in the request.")]
    is_enabled: bool
    version: int
    created: datetime
    updated: datetime
    etag: Annotated[str, Shown("For If-Match.")]


RULES: Final = Resource(
    rules,
    what="rule",
    noun="rule",
    tag="r{id}",
    record=lambda row, etag: record_of_row(Rule, row, etag=etag),
    detail=lambda row: {
        "name": row.name,
        "event": row.event,
        "actions": [action["kind"] for action in row.actions],
    },
    is_visible=lambda row, visible: is_within(row.condition, row.actions, visible),
    root=lambda row: row.condition.get("root"),
)


class Condition(Parameters):
    """Checkpoints of a rule: all given members must match.

    ``run``: glob of the run's key. ``tag``: the checkpoint has the tag, or receives the tag later.
    ``every_steps``: the step is a multiple.
    """

    root: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None, description="Name of a root; null: any."
    )
    run: PlainText | None = Field(default=None, description="Glob for the key of the run.")
    tag: Name | None = Field(default=None, description="The checkpoint has this tag, or gets it later.")
    formats: Annotated[tuple[SourceFormat, ...], Field(min_length=1, max_length=4, strict=False)] | None = (
        Field(default=(None), description="Formats; any of them matches.")
    )
    every_steps: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = Field(
        default=None, description="Only steps that are multiples of this number."
    )


class VerifyAction(Parameters):
    """Compare all bytes with their checksums."""

    kind: Literal["verify"]


class StatsAction(Parameters):
    """Compute statistics of the values."""

    kind: Literal["stats"]


class ConvertAction(ConvertOptions):
    """Convert the checkpoint to ``target_key`` with the fields ``{run}``, ``{name}``, ``{stem}`` (name
    without suffix), ``{step}``, ``{root}``, and ``{id}``. Results of conversions are not converted again."""

    kind: Literal["convert"]
    target_key: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Path of the target, with `{run}`, `{name}`, `{stem}`, `{step}`, `{root}` and `{id}`."
    )

    @model_validator(mode="after")
    def _expands(self) -> Self:
        self.params(1, _EXAMPLE)
        return self

    def params(self, checkpoint_id: int, fields: Mapping[str, object]) -> ConvertParams:
        """Make the job's parameters for this checkpoint. Raises ValueError for a missing field or invalid
        parameters."""
        given: dict[str, Any] = self.model_dump(exclude={"kind", "target_key"}, exclude_unset=True)
        key = _expanded(self.target_key, fields)
        return ConvertParams.model_validate({**given, "checkpoint_id": checkpoint_id, "target_key": key})


Action = Annotated[VerifyAction | StatsAction | ConvertAction, Field(discriminator="kind")]
ACTIONS: Final[TypeAdapter[tuple[Action, ...]]] = TypeAdapter(tuple[Action, ...])


def _expanded(template: str, fields: Mapping[str, object]) -> str:
    """Fill in the fields of ``template``; an empty run leaves no slash. Raises ValueError."""

    def value(match: re.Match[str]) -> str:
        found = fields.get(match[1])
        if found is None:
            known = ", ".join(f"{{{name}}}" for name in _EXAMPLE)
            if match[1] not in _EXAMPLE:
                raise ValueError(f"target_key: {match[0]} is not one of {known}")
            raise ValueError(f"target_key: the checkpoint has no {match[1]}")
        return str(found)

    expanded = _FIELD.sub(value, template)
    if "{" in expanded or "}" in expanded:
        raise ValueError("target_key: braces are allowed only around fields")
    return re.sub(r"/{2,}", "/", expanded).lstrip("/") if "{run}" in template else expanded


@feature.consumer(
    "automation", kinds=get_args(RuleEvent), is_needed=partial(RULES.has, is_enabled=True), batch=100
)
def apply_rules(connection: Connection, events: Sequence[CatalogEvent], context: ScheduleContext) -> None:
    """Submit the jobs of enabled rules for the events."""
    rules = RULES.rows(connection, is_enabled=True)
    for rule in without_scope(connection, rules, _roots_of, role_settings(context.settings)):
        rules.remove(rule)
        _disable(connection, rule, context.now)
    for event in events:
        concerned = [rule for rule in rules if _is_for(rule, event)]
        found = _committed(connection, event) if concerned else None
        if found is not None:
            for rule in concerned:
                _apply(connection, rule, found, context)


def _disable(connection: Connection, rule: Row[Any], now: float) -> None:
    values = {"is_enabled": False, "version": rule.version + 1, "updated_seconds": now}
    connection.execute(update(RULES.table).where(RULES.table.c.id == rule.id).values(values))
    detail = {"name": rule.name, "reason": NOT_ADMIN}
    about = "rule.disable", f"rule:{rule.id}", detail
    audit.record(connection, SYSTEM.name, *about, now=now, root=RULES.root(rule))


def _is_for(rule: Row[Any], event: CatalogEvent) -> bool:
    if event.at_seconds < rule.updated_seconds:
        return False
    tag = rule.condition.get("tag")
    has_tag = tag is None or tag in event.data.get("tags", ())
    if event.kind == rule.event:
        return rule.event != "checkpoint.tagged" or has_tag
    # a tag added after the commit can make the checkpoint match
    is_late_tag = event.kind == "checkpoint.tagged" and rule.event == "checkpoint.committed"
    return is_late_tag and tag is not None and has_tag


def _committed(connection: Connection, event: CatalogEvent) -> CheckpointDetail | None:
    if event.checkpoint_id is None:
        return None
    try:
        found = get_checkpoint(connection, event.checkpoint_id)
    except MissingError:
        return None
    return found if found.state == "committed" else None


def _apply(connection: Connection, rule: Row[Any], found: CheckpointDetail, context: ScheduleContext) -> None:
    if _holds(connection, Condition.model_validate(rule.condition), found):
        for action in ACTIONS.validate_python(rule.actions, strict=False):
            _act(connection, rule, action, found, context)


def _holds(connection: Connection, condition: Condition, found: CheckpointDetail) -> bool:
    if condition.root not in (None, found.root):
        return False
    if condition.formats is not None and found.format not in condition.formats:
        return False
    if condition.tag is not None and condition.tag not in found.tags:
        return False
    if condition.every_steps is not None and (found.step is None or found.step % condition.every_steps):
        return False
    if condition.run is None:
        return True
    return bool(connection.execute(select(matches(connection, literal(found.run), condition.run))).scalar())


def _act(
    connection: Connection, rule: Row[Any], action: Action, found: CheckpointDetail, context: ScheduleContext
) -> None:
    """Submit a job. A refusal becomes an entry of the audit log and does not stop the consumer."""
    caller = Principal(f"rule:{rule.name}", ALL_SCOPES)
    kind = kinds()[action.kind]
    try:
        if not isinstance(action, ConvertAction):
            params: Any = kind.params.model_validate({"checkpoint_id": found.id})
        elif _is_converted(connection, found):
            return
        else:
            params = action.params(found.id, _fields(found))
        spec = kind.specify(connection, params, caller, context.settings)
        job_id, is_new = submit_or_join(connection, spec, context.now)
    except (CatalogError, ProblemError, ValueError) as error:
        why = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
        entry = "rule.refused", f"checkpoint:{found.id}", {"action": action.kind, "problem": why[:500]}
    else:
        made = {"kind": action.kind, "checkpoint": found.id, "rule": rule.id}
        entry = "job.submit", f"job:{job_id}", made
        if not is_new:
            return
    audit.record(connection, caller.name, *entry, now=context.now)


def _is_converted(connection: Connection, found: CheckpointDetail) -> bool:
    """Return True for a target of a conversion, also a planned target: rules would otherwise convert
    endlessly."""
    made = select(lineage.c.child_id).where(
        lineage.c.child_id == found.id, lineage.c.kind == "converted_from"
    )
    making = select(jobs.c.id).where(jobs.c.dedup_key == target_dedup_key(found.root, found.key))
    return any(connection.execute(query.limit(1)).first() is not None for query in (made, making))


def _fields(found: CheckpointDetail) -> dict[str, object]:
    """Return the values of the fields of a target's key."""
    stem = found.name.rpartition(".")[0] if "." in found.name.lstrip(".") else found.name
    fields = {"root": found.root, "run": found.run, "name": found.name, "stem": stem, "id": found.id}
    return fields if found.step is None else {**fields, "step": found.step}
