"""The consumer of events that applies rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from pydantic import ValidationError
from sqlalchemy import Connection, Row, literal, select

from dcp.server.catalog import audit
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import CatalogError, MissingError
from dcp.server.catalog.events import CatalogEvent
from dcp.server.catalog.names import matches
from dcp.server.core.jobs.ledger.transitions import submit_or_join
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.problems import ProblemError
from dcp.server.core.security.principal import ALL_SCOPES, Principal
from dcp.server.database.tables import jobs, lineage
from dcp.server.features import kinds
from dcp.server.features.convert.job import target_dedup_key
from dcp.server.features.rules import feature
from dcp.server.features.rules.rules import ACTIONS, RULES, Action, Condition, ConvertAction, RuleEvent
from dcp.server.records.checkpoints import CheckpointDetail

Rule = Row[Any]


@feature.consumer(
    "automation", kinds=get_args(RuleEvent), is_needed=partial(RULES.has, is_enabled=True), batch=100
)
def apply_rules(connection: Connection, events: Sequence[CatalogEvent], context: ScheduleContext) -> None:
    """Submit the jobs of all enabled rules that the events concern."""
    rules = RULES.rows(connection, is_enabled=True)
    for event in events:
        concerned = [rule for rule in rules if _is_for(rule, event)]
        found = _committed(connection, event) if concerned else None
        if found is not None:
            for rule in concerned:
                _apply(connection, rule, found, context)


def _is_for(rule: Rule, event: CatalogEvent) -> bool:
    if event.at_seconds < rule.updated_seconds:
        return False
    tag = rule.condition.get("tag")
    has_tag = tag is None or tag in event.data.get("tags", ())
    if event.kind == rule.event:
        return rule.event != "checkpoint.tagged" or has_tag
    # A tag that comes after the commit makes the checkpoint one that the rule is for.
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


def _apply(connection: Connection, rule: Rule, found: CheckpointDetail, context: ScheduleContext) -> None:
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
    connection: Connection, rule: Rule, action: Action, found: CheckpointDetail, context: ScheduleContext
) -> None:
    """Submit a job. A refusal is an entry of the audit log, and stops nothing else."""
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
    """Return whether it is, or becomes, the target of a conversion: rules would convert without end."""
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
