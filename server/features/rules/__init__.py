"""Rules: jobs that follow an event by themselves."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("rules", __name__, web=["api"])
