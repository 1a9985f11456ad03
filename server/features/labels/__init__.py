"""Tags, pins, aliases and metrics of checkpoints."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("labels", __name__, web=["api"])
