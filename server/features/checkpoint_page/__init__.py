"""The page of a checkpoint, with panels of other features, and that of its files."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("checkpoint_page", __name__, web=["page"])
