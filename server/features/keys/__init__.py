"""API keys: made, listed and revoked."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("keys", __name__, web=["api", "pages"])
