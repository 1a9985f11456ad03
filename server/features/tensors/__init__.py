"""Tensors: their names as lists and trees, their values, and their files."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("tensors", __name__, web=["api", "page", "slices", "layers"])
