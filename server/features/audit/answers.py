"""The audit log as JSON."""

from __future__ import annotations

from dcp.server.core.answers import Answer
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records.administration import AuditEntry

__all__ = ["AuditAnswer", "AuditList"]


@answers(AuditEntry)
class AuditAnswer(RecordAnswer):
    """A change that was requested."""


class AuditList(Answer):
    """A page, newest first."""

    items: list[AuditAnswer]
    next_cursor: str | None
