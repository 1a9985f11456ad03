"""The audit log: who did what and when."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.core.http.dependencies import Db, PageParams, requires
from dcp.server.core.inputs import Text
from dcp.server.core.pages.queries import pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.features.audit import api

__all__ = ["router"]

router = pages_router()

_ROWS: Final = 50
_Day = Annotated[date, Field(ge=date(1970, 1, 1), le=date(9998, 12, 31))]
_PAGES: Final = {"checkpoint": "/checkpoints/{}", "run": "/runs/{}", "job": "/jobs/{}"}
"""Of targets, which are a kind and a number."""


class AuditView(BaseModel):
    """Which entries; days are whole ones of UTC."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    actor: Text | None = None
    action: Text | None = None
    target: Text | None = None
    since: _Day | None = None
    until: _Day | None = None
    cursor: Annotated[str, Field(max_length=2048)] | None = None

    @property
    def words(self) -> dict[str, Any]:
        """What has to be equal."""
        asked = {"actor": self.actor, "action": self.action, "target": self.target}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def times(self) -> dict[str, datetime]:
        """From which time on, and to before which."""
        days = {"since": self.since, "until": self.until and self.until + timedelta(days=1)}
        return {
            name: datetime(day.year, day.month, day.day, tzinfo=UTC)
            for name, day in days.items()
            if day is not None
        }


@router.get("/audit", dependencies=[requires("admin", all_roots=True)])
def audit_page(view: Annotated[AuditView, Query()], request: Request, database: Db) -> Response:
    """What was done, newest first."""
    seconds: dict[str, Any] = {name: moment.timestamp() for name, moment in view.times.items()}
    found = api.list_audit(database, PageParams(_ROWS, view.cursor), **view.words, **seconds)
    asked = view.words | {name: f"{moment:%Y-%m-%dT%H:%M:%SZ}" for name, moment in view.times.items()}
    return page(
        request,
        "audit.html",
        twin=f"/api/v1/audit?{urlencode(asked)}" if asked else "/api/v1/audit",
        view=view,
        entries=[(entry, _page_of(entry.target), _said(entry.detail)) for entry in found.items],
        next_cursor=found.next_cursor,
        is_filtered=bool(asked),
    )


def _page_of(target: str) -> str | None:
    """Where the target is shown; None if nowhere."""
    kind, _, number = target.partition(":")
    if kind == "root" and number:
        return f"/?{urlencode({'root': number})}"
    return _PAGES[kind].format(number) if kind in _PAGES and number.isdecimal() else None


def _said(detail: dict[str, Any] | None) -> str:
    """In one line, without what is not there."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in (detail or {}).items()
        if value is not None
    )
