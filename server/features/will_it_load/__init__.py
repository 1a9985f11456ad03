"""Checks of whether a checkpoint fills the state of a model or of another checkpoint."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.will_it_load.job import ShapesKind

__all__ = ["feature"]

feature: Final = Feature("will_it_load", __name__, kinds=[ShapesKind()], web=["web"])
