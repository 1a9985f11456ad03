"""Lineage: the checkpoints that a checkpoint was made of, and those that were made of it."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("lineage", __name__, web=["web"])
