"""Runs as a list, and a run over its steps."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("runs", __name__, web=["run_pages", "live"])
