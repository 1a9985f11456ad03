"""Checkpoints of the catalog: listed, counted, found by name, registered and shown."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("checkpoints", __name__, web=["web"])
