"""Signing in with a key, and out."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("sign_in", __name__, web=["pages"])
