"""What a worker does periodically, beside jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from sqlalchemy import Connection

from dcp.server.catalog.roots import sync_roots
from dcp.server.core.jobs.cleaning import forget_jobs, forget_scans
from dcp.server.core.jobs.ledger.transitions import submit
from dcp.server.core.jobs.schedules import PeriodicWork, ScheduleContext
from dcp.server.core.roots import Roots
from dcp.server.core.security.principal import SYSTEM
from dcp.server.core.settings import Settings
from dcp.server.database.documents import abandon_documents
from dcp.server.database.drafts import forget_drafts
from dcp.server.features.rules.periodic import consume_events, has_events, is_anything_due, submit_due
from dcp.server.features.scan.asking import scan_spec
from dcp.server.features.webhooks.delivering import deliver_due
from dcp.server.features.webhooks.hooks import forget_previous_secrets, reseal_secrets
from dcp.server.features.webhooks.ledger import forget_deliveries
from dcp.server.features.webhooks.ledger import is_anything_due as is_any_delivery_due
from dcp.server.features.webhooks.sealing import Sealer

__all__ = ["built_in_schedules"]

_DUE_SECONDS: Final = 10.0
_CLEANING_SECONDS: Final = 600.0
_MOST_CLEANING_SECONDS: Final = 5.0
_FORGETTING: Final = (forget_jobs, forget_deliveries)
_KEEP_SCANS_SECONDS: Final = 3600.0
_KEEP_DRAFTS_SECONDS: Final = 86_400.0
_SCAN_PRIORITY: Final = 10
"""They are short, and what others wait for may depend on what they find."""


def built_in_schedules(settings: Settings) -> Sequence[PeriodicWork]:
    """All of them."""
    scans = [
        PeriodicWork(f"scan:{name}", root.scan_seconds, partial(_scan, root=name))
        for name, root in sorted(settings.roots.items())
        if root.scan_seconds > 0
    ]
    return [
        *scans,
        PeriodicWork("webhooks", settings.poll_seconds, _deliver, is_any_delivery_due),
        PeriodicWork("automation", settings.poll_seconds, _consume, has_events),
        PeriodicWork("due", _DUE_SECONDS, _submit_due, partial(is_anything_due, settings=settings)),
        PeriodicWork("clean-up", _CLEANING_SECONDS, _clean),
    ]


def _deliver(context: ScheduleContext) -> None:
    deliver_due(context, context.now)


def _scan(context: ScheduleContext, root: str) -> None:
    urls = {found.name: found.url for found in Roots(context.settings.roots)}

    def ask(connection: Connection) -> int:
        sync_roots(connection, urls, now=context.now)
        spec = scan_spec(root, created_by=SYSTEM.name, priority=_SCAN_PRIORITY)
        return submit(connection, spec, context.now)

    context.database.transact(ask)


def _consume(context: ScheduleContext) -> None:
    consume_events(context.database, context.settings, context.now)


def _submit_due(context: ScheduleContext) -> None:
    submit_due(context.database, context.settings, context.now)


def _clean(context: ScheduleContext) -> None:
    context.database.transact(partial(forget_previous_secrets, now=context.now))
    sealer = Sealer.from_settings(context.settings)
    if sealer.keys:
        context.database.transact(partial(reseal_secrets, sealer=sealer))
    context.database.transact(partial(abandon_documents, now=context.now))
    forget_drafts(context.database, context.now - _KEEP_DRAFTS_SECONDS)
    before = context.now - context.settings.keep_jobs_seconds
    until = time.monotonic() + _MOST_CLEANING_SECONDS
    brief = max(before, context.now - _KEEP_SCANS_SECONDS)
    for forget in (
        *(partial(one, before=before) for one in _FORGETTING),
        partial(forget_scans, before=brief),
    ):
        while context.database.transact(forget):
            if context.stop.is_set() or time.monotonic() > until:
                return
