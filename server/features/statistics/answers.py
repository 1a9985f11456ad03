"""Statistics of a checkpoint, as they are answered."""

from __future__ import annotations

from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records.contents import Statistics

__all__ = ["StatisticsAnswer"]


@answers(Statistics)
class StatisticsAnswer(RecordAnswer):
    """Statistics of a checkpoint's values: of all tensors together, and of those of this page."""

    next_cursor: str | None
