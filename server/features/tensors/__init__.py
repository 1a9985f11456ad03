"""Tensors: names, values, slices, pictures."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("tensors", __name__, web=["api", "drawings_api", "pages", "layers"])
