"""Which rules an event concerns, and the jobs that they make of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, literal, select

from dcp.server.catalog import audit
from dcp.server.catalog.checkpoints import CheckpointDetail, get_checkpoint
from dcp.server.catalog.errors import CatalogError, MissingError
from dcp.server.catalog.events import CatalogEvent
from dcp.server.catalog.names import matches
from dcp.server.core.jobs.ledger.rows import unfinished_job
from dcp.server.core.jobs.ledger.transitions import submit_or_join
from dcp.server.core.problems import ProblemError
from dcp.server.core.security.principal import ALL_SCOPES, Principal
from dcp.server.core.settings import Settings
from dcp.server.database.tables import lineage
from dcp.server.features import kinds
from dcp.server.features.convert.job import target_dedup_key
from dcp.server.features.rules.actions import Action, Condition, ConvertAction
from dcp.server.features.rules.rules import RuleRow

__all__ = ["EVENTS", "act_on"]

EVENTS = ("checkpoint.committed", "checkpoint.verified", "checkpoint.tagged")
"""Those that can concern a rule."""


def act_on(
    connection: Connection, event: CatalogEvent, rules: Sequence[RuleRow], settings: Settings, now: float
) -> int:
    """Make the jobs of all ``rules`` that ``event`` concerns; how many are new.

    What a rule cannot do is told in the audit log, and stops no other one.
    """
    concerned = [rule for rule in rules if _is_for(rule, event)]
    if not concerned or event.checkpoint_id is None:
        return 0
    try:
        found = get_checkpoint(connection, event.checkpoint_id)
    except MissingError:
        return 0
    if found.state != "committed":
        return 0
    count = 0
    for rule in concerned:
        if _holds(connection, rule.condition, found):
            count += sum(_act(connection, rule, action, found, settings, now) for action in rule.actions)
    return count


def _is_for(rule: RuleRow, event: CatalogEvent) -> bool:
    if not rule.is_enabled or event.at_seconds < rule.updated_seconds:
        return False
    if event.kind == rule.event:
        return rule.event != "checkpoint.tagged" or _tells(event, rule.condition.tag)
    # A tag that comes later than the commit makes it one of those that the rule is for.
    is_late_tag = event.kind == "checkpoint.tagged" and rule.event == "checkpoint.committed"
    return is_late_tag and rule.condition.tag is not None and _tells(event, rule.condition.tag)


def _tells(event: CatalogEvent, tag: str | None) -> bool:
    return tag is None or tag in event.data.get("tags", ())


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
    connection: Connection,
    rule: RuleRow,
    action: Action,
    found: CheckpointDetail,
    settings: Settings,
    now: float,
) -> int:
    caller = Principal(f"rule:{rule.name}", ALL_SCOPES)
    try:
        if isinstance(action, ConvertAction):
            if _is_converted(connection, found):
                return 0
            params: Any = action.params(found.id, _fields(found))
        else:
            params = kinds()[action.kind].params.model_validate({"checkpoint_id": found.id})
        spec = kinds()[action.kind].specify(connection, params, caller, settings)
        job_id, is_new = submit_or_join(connection, spec, now)
    except (CatalogError, ProblemError, ValueError) as error:
        detail = {"action": action.kind, "problem": _told(error)}
        audit.record(connection, caller.name, "rule.refused", f"checkpoint:{found.id}", detail, now=now)
        return 0
    if is_new:
        made = {"kind": action.kind, "checkpoint": found.id, "rule": rule.id}
        audit.record(connection, caller.name, "job.submit", f"job:{job_id}", made, now=now)
    return int(is_new)


def _told(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"])[:500]
    return str(error)[:500]


def _is_converted(connection: Connection, found: CheckpointDetail) -> bool:
    """Whether it is, or is just becoming, the target of a conversion: that would go on for ever."""
    made = select(lineage.c.child_id).where(
        lineage.c.child_id == found.id, lineage.c.kind == "converted_from"
    )
    if connection.execute(made.limit(1)).first() is not None:
        return True
    return unfinished_job(connection, target_dedup_key(found.root, found.key)) is not None


def _fields(found: CheckpointDetail) -> dict[str, object]:
    stem = found.name.rpartition(".")[0] if "." in found.name.lstrip(".") else found.name
    fields: dict[str, object] = {"root": found.root, "run": found.run, "name": found.name, "id": found.id}
    fields["stem"] = stem
    if found.step is not None:
        fields["step"] = found.step
    return fields
