"""The audit log."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from dcp.server.catalog.audit import AuditEntry
from dcp.server.core.answers import Answer, rfc3339

__all__ = ["AuditAnswer", "AuditList"]


class AuditAnswer(Answer):
    """Somebody did something."""

    id: int
    at: str
    actor: str = Field(examples=["key:ci", "system"])
    action: str = Field(examples=["checkpoint.state"])
    target: str = Field(examples=["checkpoint:12"])
    detail: dict[str, Any] | None
    request_id: str | None
    address: str | None

    @classmethod
    def of(cls, entry: AuditEntry) -> Self:
        """One row."""
        return cls(
            id=entry.id,
            at=rfc3339(entry.at_seconds),
            actor=entry.actor,
            action=entry.action,
            target=entry.target,
            detail=entry.detail,
            request_id=entry.request_id,
            address=entry.address,
        )


class AuditList(Answer):
    """A page, newest first."""

    items: list[AuditAnswer]
    next_cursor: str | None
