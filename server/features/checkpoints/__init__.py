"""Checkpoints of the catalog: lists, details, registration."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("checkpoints", __name__, web=["finding", "api", "lists"])
