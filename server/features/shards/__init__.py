"""Shards: which rank holds what, phases of a save, the map of a checkpoint."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("shards", __name__, web=["drawings_api", "api", "pages", "anatomy"])
