"""Roots: listed, and scanned when asked."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("roots", __name__, web=["api", "pages"])
