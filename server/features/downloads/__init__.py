"""Files of a checkpoint, and a checkpoint as one file."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("downloads", __name__, web=["web"])
