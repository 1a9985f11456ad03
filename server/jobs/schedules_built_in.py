"""What a worker does periodically, beside jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from dcp.server.jobs.cleaning import forget_jobs
from dcp.server.jobs.schedules import Schedule, ScheduleContext
from dcp.server.settings import Settings
from dcp.server.webhooks import deliver_due, forget_deliveries, is_anything_due

__all__ = ["built_in_schedules"]

_CLEANING_SECONDS: Final = 600.0
_MOST_CLEANING_SECONDS: Final = 5.0
_FORGETTING: Final = (forget_jobs, forget_deliveries)


def built_in_schedules(settings: Settings) -> Sequence[Schedule]:
    """All of them."""
    return [
        Schedule("webhooks", max(1.0, settings.poll_seconds), _deliver, is_anything_due),
        Schedule("clean-up", _CLEANING_SECONDS, _clean),
    ]


def _deliver(context: ScheduleContext) -> None:
    deliver_due(context, context.now)


def _clean(context: ScheduleContext) -> None:
    before = context.now - context.settings.keep_jobs_seconds
    until = time.monotonic() + _MOST_CLEANING_SECONDS
    for forget in _FORGETTING:
        while context.database.transact(partial(forget, before=before)):
            if context.stop.is_set() or time.monotonic() > until:
                return
