"""The audit log as a list and a page. Admins of some roots see the entries of these roots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.catalog.audit import audit_page
from dcp.server.catalog.inputs import Text, Time
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.http.dependencies import PageQuery
from dcp.server.records.administration import AuditEntry
from dcp.server.records.lists import Page

feature: Final = Feature("audit", __name__)

_ROWS: Final = 50
_Day = Annotated[date, Field(ge=date(1970, 1, 1), le=date(9998, 12, 31))]
_PAGES: Final = {
    "account": "/people/{}",
    "checkpoint": "/checkpoints/{}",
    "run": "/runs/{}",
    "job": "/jobs/{}",
}
"""Pages of targets, by kind of target."""


@feature.get("/audit", tag="audit", scope="admin", errors=())
def list_audit(
    ask: Ask,
    page: PageQuery,
    actor: Annotated[Text | None, Query(description="Account or key, such as key:alice.")] = None,
    action: Annotated[Text | None, Query(description="Action, such as checkpoint.state.")] = None,
    target: Annotated[
        Text | None, Query(description="Kind and `id` of the changed object, such as checkpoint:12.")
    ] = None,
    root: Annotated[Text | None, Query(description="Name of the root of the target.")] = None,
    since: Annotated[Time | None, Query(description="Time of the entry, inclusive.")] = None,
    until: Annotated[Time | None, Query(description="Time of the entry, exclusive.")] = None,
) -> Page[AuditEntry]:
    """List audit entries, newest first. Filters compare for equality."""
    return ask.find(
        audit_page,
        actor=actor,
        action=action,
        target=target,
        root=root,
        visible=ask.visible,
        since_seconds=since,
        until_seconds=until,
        cursor=page.cursor,
        limit=page.limit,
    )


class AuditView(BaseModel):
    """Filters of the page. Days are whole days in UTC."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    actor: Text | None = None
    action: Text | None = None
    target: Text | None = None
    root: Text | None = None
    since: _Day | None = None
    until: _Day | None = None
    cursor: Annotated[str, Field(max_length=2048)] | None = None

    @property
    def words(self) -> dict[str, Any]:
        """Filters for equality."""
        asked = {"actor": self.actor, "action": self.action, "target": self.target, "root": self.root}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def times(self) -> dict[str, datetime]:
        """First moment inside the interval, and first moment after the interval."""
        days = {"since": self.since, "until": self.until and self.until + timedelta(days=1)}
        return {
            name: datetime(day.year, day.month, day.day, tzinfo=UTC)
            for name, day in days.items()
            if day is not None
        }


@feature.page("/audit", "audit.html", scope="admin")
def audit_log_page(view: Annotated[AuditView, Query()], ask: Ask) -> dict[str, Any]:
    """Show the entries, newest first."""
    seconds: dict[str, Any] = {f"{name}_seconds": moment.timestamp() for name, moment in view.times.items()}
    found = ask.find(
        audit_page, **view.words, **seconds, visible=ask.visible, cursor=view.cursor, limit=_ROWS
    )
    asked = view.words | {name: f"{moment:%Y-%m-%dT%H:%M:%SZ}" for name, moment in view.times.items()}
    return {
        "twin": f"/api/v1/audit?{urlencode(asked)}" if asked else "/api/v1/audit",
        "view": view,
        "entries": [(entry, _page_of(entry.target), _in_words(entry.detail)) for entry in found.items],
        "next_cursor": found.next_cursor,
        "roots": [root.name for root in ask.roots if ask.caller.may_see(root.name)],
        "is_filtered": bool(asked),
    }


def _page_of(target: str) -> str | None:
    """Return the page of the target, or None."""
    kind, _, number = target.partition(":")
    if kind == "root" and number:
        return f"/?{urlencode({'root': number})}"
    return _PAGES[kind].format(number) if kind in _PAGES and number.isdecimal() else None


def _in_words(detail: Mapping[str, Any] | None) -> str:
    """Format details in one line, without null values."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in (detail or {}).items()
        if value is not None
    )
