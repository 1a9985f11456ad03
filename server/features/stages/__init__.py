"""Stages of checkpoints, such as production: requests, approvals, and history.

A stage is a protected alias of the run with rules for changes. Lookup by alias, search, filters, and
retention therefore support stages: a checkpoint in a stage is neither deleted nor pruned.
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
