"""Statistics of the values of tensors, which a job computes."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.statistics.job import StatsKind

__all__ = ["feature"]

feature: Final = Feature("statistics", __name__, kinds=[StatsKind()], web=["web"])
