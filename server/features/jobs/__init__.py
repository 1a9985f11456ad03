"""Jobs: submitted, listed, followed, cancelled and retried."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("jobs", __name__, web=["job_routes"])
