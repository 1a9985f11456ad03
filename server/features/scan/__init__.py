"""Scans: what roots hold, found by a job; what a trainer registers."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.scan.job import ScanKind

__all__ = ["feature"]

feature: Final = Feature("scan", __name__, kinds=[ScanKind()])
