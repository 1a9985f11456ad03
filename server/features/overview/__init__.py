"""The first page: runs and what happens now."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("overview", __name__, web=["pages"])
