"""Automatic handovers: jobs for events that match a trigger, and for deletions of handed-over checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, literal, select

from dcp.server.catalog import audit
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import CatalogError
from dcp.server.catalog.events import CatalogEvent
from dcp.server.catalog.names import matches
from dcp.server.core.jobs.ledger.transitions import submit_or_join
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.problems import ProblemError
from dcp.server.core.security.principal import ALL_SCOPES, Principal
from dcp.server.features.handover import feature
from dcp.server.features.handover.destinations import HandoverSettings, Target, Trigger
from dcp.server.features.handover.handing import HandoverKind, HandoverParams, options_of, targets_of

_CALLER = Principal("handover", ALL_SCOPES)


@feature.consumer("handover", batch=100)
def submit_handovers(
    connection: Connection, events: Sequence[CatalogEvent], context: ScheduleContext
) -> None:
    """Submit the jobs for the events."""
    options = options_of(context.settings)
    if not options.targets:
        return
    for event in events:
        if event.checkpoint_id is not None:
            for target in _targets(connection, event, options):
                _submit(connection, event.checkpoint_id, target, context)


def _targets(connection: Connection, event: CatalogEvent, options: HandoverSettings) -> list[Target]:
    wanted: set[str] = {
        target for one in options.when if _meets(connection, event, one) for target in one.targets
    }
    if event.kind == "checkpoint.deleted" and event.checkpoint_id is not None:
        wanted |= targets_of(connection, event.checkpoint_id)
    return [target for target in options.targets if target in wanted]


def _meets(connection: Connection, event: CatalogEvent, trigger: Trigger) -> bool:
    data = event.data
    if event.kind != trigger.event or trigger.root not in (None, event.root):
        return False
    if trigger.alias not in (None, data.get("alias")) or trigger.stage not in (None, data.get("stage")):
        return False
    if trigger.tag is not None and trigger.tag not in data.get("tags", ()):
        return False
    if trigger.run is None or event.checkpoint_id is None:
        return trigger.run is None
    run = get_checkpoint(connection, event.checkpoint_id).run
    return bool(connection.execute(select(matches(connection, literal(run), trigger.run))).scalar())


def _submit(connection: Connection, checkpoint_id: int, target: Target, context: ScheduleContext) -> None:
    """Submit a job. A refusal becomes an entry of the audit log and does not stop the consumer."""
    kind, params = HandoverKind(), HandoverParams(checkpoint_id=checkpoint_id, target=target)
    entry: tuple[str, str, dict[str, Any]]
    try:
        spec = kind.specify(connection, params, _CALLER, context.settings)
        job_id, is_new = submit_or_join(connection, spec, context.now)
    except (CatalogError, ProblemError) as error:
        entry = "handover.refused", f"checkpoint:{checkpoint_id}", {"target": target, "problem": str(error)}
    else:
        entry = "job.submit", f"job:{job_id}", {"kind": kind.name, "checkpoint": checkpoint_id}
        if not is_new:
            return
    audit.record(connection, _CALLER.name, *entry, now=context.now)
