"""Lineage of a checkpoint: JSON, a drawn graph, and a summary on the checkpoint's page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dcp.server.catalog.details import get_checkpoint
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.features.lineage import Lineage, feature, lineage_of
from dcp.server.records.checkpoints import CheckpointDetail

BOX_WIDTH: Final = 216
BOX_HEIGHT: Final = 62
_BETWEEN_COLUMNS: Final = 76
_BETWEEN_ROWS: Final = 18
_MAX_ROWS: Final = 12
_MAX_DISTANCE: Final = 6
"""Limit for the graph. Checkpoints farther away, or more in a column, are in the table only."""


@dataclass(frozen=True, slots=True)
class NodeBox:
    """Node of the graph with its corner in pixels."""

    node: Any
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Line:
    """Edge as an SVG path, from the right of the source to the left of the result."""

    edge: Any
    path: str


@dataclass(frozen=True, slots=True)
class Graph:
    """Drawn graph, without ``left_out`` nodes."""

    boxes: tuple[NodeBox, ...]
    lines: tuple[Line, ...]
    width: int
    height: int
    left_out: int
    box_width: int = BOX_WIDTH
    box_height: int = BOX_HEIGHT


def graph_of(nodes: Sequence[Any], edges: Sequence[Any]) -> Graph:
    """Lay out the graph. ``nodes`` have ``id`` and ``distance`` (the column); ``edges`` have ``parent_id``
    and ``child_id``."""
    columns = _columns(nodes, edges)
    rows = max(map(len, columns.values()), default=0)
    boxes = {
        node.id: NodeBox(node, column * (BOX_WIDTH + _BETWEEN_COLUMNS), _y(row, len(found), rows))
        for column, (_, found) in enumerate(sorted(columns.items()))
        for row, node in enumerate(found)
    }
    lines = [
        Line(edge, _path(boxes[edge.parent_id], boxes[edge.child_id]))
        for edge in edges
        if edge.parent_id in boxes and edge.child_id in boxes
    ]
    return Graph(
        tuple(boxes.values()),
        tuple(lines),
        width=len(columns) * (BOX_WIDTH + _BETWEEN_COLUMNS) - _BETWEEN_COLUMNS,
        height=rows * (BOX_HEIGHT + _BETWEEN_ROWS) - _BETWEEN_ROWS,
        left_out=len(nodes) - len(boxes),
    )


def _columns(nodes: Sequence[Any], edges: Sequence[Any]) -> dict[int, list[Any]]:
    """Return columns by distance, from the middle outwards. Each node is near the height of its neighbours,
    so lines rarely cross."""
    by_distance: defaultdict[int, list[Any]] = defaultdict(list)
    for node in nodes:
        by_distance[node.distance].append(node)
    neighbours: defaultdict[int, list[int]] = defaultdict(list)
    for edge in edges:
        neighbours[edge.parent_id].append(edge.child_id)
        neighbours[edge.child_id].append(edge.parent_id)
    places: dict[int, float] = {}
    found: dict[int, list[Any]] = {}
    for distance in sorted(by_distance, key=abs):
        if abs(distance) > _MAX_DISTANCE:
            continue
        ordered = sorted(
            by_distance[distance], key=lambda node: (_mean_place(neighbours[node.id], places), node.id)
        )
        found[distance] = ordered[:_MAX_ROWS]
        middle = (len(found[distance]) - 1) / 2
        places |= {node.id: row - middle for row, node in enumerate(found[distance])}
    return found


def _mean_place(of: Iterable[int], places: Mapping[int, float]) -> float:
    known = [places[one] for one in of if one in places]
    return sum(known) / len(known) if known else 0.0


def _y(row: int, count: int, rows: int) -> int:
    """Return the vertical position, centred on the highest column."""
    return round((row + (rows - count) / 2) * (BOX_HEIGHT + _BETWEEN_ROWS))


def _path(start: NodeBox, end: NodeBox) -> str:
    x, y = start.x + BOX_WIDTH, start.y + BOX_HEIGHT // 2
    to_x, to_y = end.x, end.y + BOX_HEIGHT // 2
    bend = max(30, abs(to_x - x) // 2)
    return f"M{x} {y}C{x + bend} {y} {to_x - bend} {to_y} {to_x} {to_y}"


@feature.get("/checkpoints/{checkpoint_id}/lineage", tag="checkpoints")
def get_lineage(checkpoint_id: IdPath, ask: Ask) -> Lineage:
    """Return all visible ancestors and descendants, nearest first."""
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
