"""Search over runs, checkpoints, tags and tensors."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("search", __name__, web=["api", "pages"])
