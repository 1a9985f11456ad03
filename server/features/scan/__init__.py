"""Scans of roots, by a job; registration by trainers."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.scan.job import ScanKind, scans

__all__ = ["feature"]

feature: Final = Feature("scan", __name__, kinds=[ScanKind()], schedules=[scans])
