"""Runs."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from dcp.server.catalog.labelling.series import Series
from dcp.server.records.runs import Run
from dcp.server.schemas.common import Answer, rfc3339
from dcp.server.schemas.records import RecordAnswer, answers

__all__ = ["PointAnswer", "RunAnswer", "RunList", "SeriesAnswer"]


@answers(Run)
class RunAnswer(RecordAnswer):
    """A folder that holds checkpoints; what is counted are committed ones."""


class PointAnswer(Answer):
    """Neighbouring checkpoints of a run, of which there may be one."""

    checkpoint_id: int = Field(description="Of one of them.")
    first_step: int
    last_step: int
    last_at: str = Field(description="When the newest was committed.")
    count: int
    min: float
    max: float
    mean: float


class SeriesAnswer(Answer):
    """A metric over the steps of a run."""

    run_id: int
    metric: str
    count: int = Field(description="Checkpoints with a step and this metric.")
    points: list[PointAnswer]

    @classmethod
    def of(cls, found: Series) -> Self:
        """As the catalog has it."""
        points = [
            PointAnswer(
                checkpoint_id=point.checkpoint_id,
                first_step=point.first_step,
                last_step=point.last_step,
                last_at=rfc3339(point.last_seconds),
                count=point.count,
                min=point.minimum,
                max=point.maximum,
                mean=point.mean,
            )
            for point in found.points
        ]
        return cls(run_id=found.run_id, metric=found.metric, count=found.count, points=points)


class RunList(Answer):
    """A page."""

    items: list[RunAnswer]
    next_cursor: str | None
    notes: list[str] = Field(
        default=[],
        description="Why something may be missing: a root's first scan has not ended, its last one failed.",
    )
