"""Differences of two checkpoints: by their indexes at once, of values by a job."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.diff.job import DiffKind

__all__ = ["feature"]

feature: Final = Feature("diff", __name__, kinds=[DiffKind()], web=["web", "changes"])
