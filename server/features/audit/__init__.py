"""The audit log: its entries, listed and as a page."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("audit", __name__, web=["api", "pages"])
