"""Runs."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from dcp.server.catalog.runs import Run
from dcp.server.schemas.common import Answer, optional_rfc3339, rfc3339

__all__ = ["RunAnswer", "RunList"]


class RunAnswer(Answer):
    """A folder that holds checkpoints; what is counted are committed ones."""

    id: int
    root: str
    key: str = Field(description="Relative to the root; empty: the root itself.")
    checkpoint_count: int
    latest_step: int | None
    latest_at: str | None
    bytes: int
    created_at: str
    updated_at: str

    @classmethod
    def of(cls, run: Run) -> Self:
        """As the catalog has it."""
        return cls.model_construct(
            id=run.id,
            root=run.root,
            key=run.key,
            checkpoint_count=run.checkpoint_count,
            latest_step=run.latest_step,
            latest_at=optional_rfc3339(run.latest_seconds),
            bytes=run.bytes,
            created_at=rfc3339(run.created_seconds),
            updated_at=rfc3339(run.updated_seconds),
        )


class RunList(Answer):
    """A page."""

    items: list[RunAnswer]
    next_cursor: str | None
    notes: list[str] = Field(
        default=[],
        description="Why something may be missing: a root's first scan has not ended, its last one failed.",
    )
