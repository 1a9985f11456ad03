"""Health, readiness, metrics, and the caller: what those who run the service ask."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("operations", __name__, web=["health", "metrics", "whoami"])
