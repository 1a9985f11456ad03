"""Drift: changes of a run's layers between steps, computed by a job and drawn as a heat map."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature, Link
from dcp.server.features.drift.job import DriftKind

__all__ = ["feature"]

feature: Final = Feature(
    "drift",
    __name__,
    kinds=[DriftKind()],
    web=["web"],
    links=[Link("run", "Changes between steps", "/runs/{id}/drift")],
)
