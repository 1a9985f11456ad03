"""Stages of checkpoints, such as production: requested, approved, and kept with their history.

A stage is a protected alias of the run with rules about who may set it. So lookup by alias, search, filters
and retention know stages: a checkpoint that is in one is neither deleted nor pruned.
"""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature, Link
from dcp.server.features.stages import stage_tables
from dcp.server.features.stages.stage_settings import StagesSettings

__all__ = ["feature", "stage_tables"]

feature: Final = Feature(
    "stages",
    __name__,
    web=["stage_routes", "stage_pages"],
    work=["expiry"],
    events=["stage.requested", "stage.promoted", "stage.rejected", "stage.demoted"],
    links=[Link("run", "Stages", "/runs/{id}/stages"), Link("menu", "Stage requests", "/stage-requests")],
    settings=StagesSettings,
)
