"""``/audit``: who did what."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from dcp.server.catalog import audit
from dcp.server.core.http.dependencies import Db, Page, requires
from dcp.server.core.http.routers import api_router
from dcp.server.core.inputs import Text, Time
from dcp.server.features.audit.answers import AuditAnswer, AuditList

__all__ = ["router"]

router = api_router("/audit", tags=["audit"], dependencies=[requires("admin", all_roots=True)])


@router.get("")
def list_audit(
    database: Db,
    page: Page,
    actor: Annotated[Text | None, Query()] = None,
    action: Annotated[Text | None, Query()] = None,
    target: Annotated[Text | None, Query()] = None,
    since: Annotated[Time | None, Query(description="From this time on.")] = None,
    until: Annotated[Time | None, Query(description="To before this time.")] = None,
) -> AuditList:
    """What was done, newest first; actor, action and target have to be equal."""
    with database.read() as connection:
        found = audit.audit_page(
            connection,
            actor=actor,
            action=action,
            target=target,
            since_seconds=since,
            until_seconds=until,
            cursor=page.cursor,
            limit=page.limit,
        )
    return AuditList(items=[AuditAnswer.of(entry) for entry in found.items], next_cursor=found.next_cursor)
