"""The page of a checkpoint, and its forms."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("checkpoint_page", __name__, web=["pages", "actions"])
