"""Pictures and statistics of a tensor, as they are answered."""

from __future__ import annotations

from typing import Literal

from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records import drawings

__all__ = ["GridAnswer", "GridValue", "TensorStatisticsAnswer"]

GridValue = Literal["mean", "min", "max", "abs_max", "nonfinite"]


@answers(drawings.TensorGrid)
class GridAnswer(RecordAnswer):
    """A matrix as cells, row by row. Values that were not asked for are empty."""


@answers(drawings.TensorStatistics)
class TensorStatisticsAnswer(RecordAnswer):
    """Statistics of one tensor's values."""
