"""What was found out about the bytes of a checkpoint: verifications, and statistics of its values."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field

from dcp.server.catalog.contents.verifications import Statistics, VerificationRow
from dcp.server.catalog.details import CheckpointDetail
from dcp.server.schemas.common import Answer, rfc3339

__all__ = ["StatisticsAnswer", "VerificationAnswer", "VerificationList"]


class VerificationAnswer(Answer):
    """One verification of a checkpoint."""

    id: int
    outcome: str = Field(description="good or damaged.")
    mode: str
    is_current: bool = Field(description="Whether the checkpoint is still what was verified.")
    findings: Any
    checked_bytes: int
    seconds: float
    created_at: str
    job_id: int | None

    @classmethod
    def of(cls, found: VerificationRow, checkpoint: CheckpointDetail) -> Self:
        """For the checkpoint as it is now."""
        return cls(
            id=found.id,
            outcome=found.outcome,
            mode=found.mode,
            is_current=found.is_of(checkpoint),
            findings=found.findings,
            checked_bytes=found.checked_bytes,
            seconds=found.seconds,
            created_at=rfc3339(found.created_seconds),
            job_id=found.job_id,
        )


class VerificationList(Answer):
    """The verifications of a checkpoint, newest first."""

    items: list[VerificationAnswer]


class StatisticsAnswer(Answer):
    """Statistics of a checkpoint's values: of all tensors together, and of those of this page."""

    is_stale: bool = Field(description="The checkpoint was replaced since they were computed.")
    created_at: str
    job_id: int | None
    total: Any
    tensor_count: int
    tensors: list[Any]
    next_cursor: str | None

    @classmethod
    def of(cls, found: Statistics, tensors: list[Any], next_cursor: str | None) -> Self:
        """With ``tensors`` of those that are kept."""
        return cls(
            is_stale=found.is_stale,
            created_at=rfc3339(found.created_seconds),
            job_id=found.job_id,
            total=found.result.get("total"),
            tensor_count=found.tensor_count,
            tensors=tensors,
            next_cursor=next_cursor,
        )
