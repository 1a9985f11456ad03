"""The lineage of a checkpoint: as JSON, as a graph, and in short on its page."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.lineage import lineage_of
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.features.lineage import feature
from dcp.server.features.lineage.graph import graph_of
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.labels import Lineage


@feature.get("/checkpoints/{checkpoint_id}/lineage", tag="checkpoints")
def get_lineage(checkpoint_id: IdPath, ask: Ask) -> Lineage:
    """All ancestors and descendants that the key may see, nearest first."""
    return ask.find(lineage_of, checkpoint_id, ask.visible)


@feature.page("/checkpoints/{checkpoint_id}/lineage", "lineage.html")
def lineage_page(checkpoint_id: IdPath, ask: Ask) -> dict[str, Any]:
    """Draw the nearest of them, and list all."""
    lineage = get_lineage(checkpoint_id, ask)
    origins = defaultdict(list)
    for edge in lineage.edges:
        origins[edge.child_id].append(edge)
    return {
        "found": ask.find(get_checkpoint, checkpoint_id, ask.visible),
        "nodes": sorted(lineage.nodes, key=lambda node: (node.distance, node.id)),
        "names": {node.id: node.key.rpartition("/")[2] for node in lineage.nodes},
        "origins": origins,
        "kinds": sorted({edge.kind for edge in lineage.edges}),
        "graph": graph_of(lineage.nodes, lineage.edges),
        "is_cut": lineage.is_cut,
    }


@feature.panel("checkpoint", "panel.html", order=40)
def lineage_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any]:
    """List the nearest ancestors and descendants, and checkpoints with the same tensors."""
    return {"lineage": get_lineage(found.id, ask)}
