"""Rules: jobs submitted automatically when checkpoints are committed, verified or tagged."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("rules", __name__, web=["web"], work=["matching"])
