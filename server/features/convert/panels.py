"""Conversions and merges on the pages of checkpoints and runs."""

from __future__ import annotations

from typing import Any

from dcp.planners.weight_maps.weight_map import ready_maps
from dcp.server.core.ask import Ask
from dcp.server.features.convert import feature
from dcp.server.features.roots import writable_roots
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.runs import Run
from dcp.storage.formats.registry import target_names


@feature.panel("checkpoint.actions", "actions.html", order=20)
def convert_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Offer forms that convert and merge the checkpoint, where a root takes the result."""
    return _targets(ask)


@feature.panel("run", "average.html", order=10)
def average_panel(ask: Ask, run: Run) -> dict[str, Any] | None:
    """Offer a form that averages the newest steps, where a root takes the result."""
    return _targets(ask) if run.checkpoint_count else None


def _targets(ask: Ask) -> dict[str, Any] | None:
    roots = writable_roots(ask) if ask.caller.may("convert") else []
    return {"roots": roots, "targets": target_names(), "maps": list(ready_maps())} if roots else None
