"""Statistics of the values of tensors, computed by a job."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.statistics.job import StatsKind

__all__ = ["feature"]

feature: Final = Feature("statistics", __name__, kinds=[StatsKind()], web=["api"])
