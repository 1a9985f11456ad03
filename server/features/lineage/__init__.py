"""Lineage: sources and results of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from sqlalchemy import ColumnElement, Connection, Select, literal, null, select, union_all

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.inputs import clean_text
from dcp.server.core.feature import Feature
from dcp.server.database.engine import insert_missing
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import checkpoints, lineage, roots
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.declaring import Shown

feature: Final = Feature("lineage", __name__, web=["graph"])


@dataclass(frozen=True, slots=True)
class LineageNode:
    """Checkpoint in a lineage; ``distance`` is negative for ancestors of the requested checkpoint."""

    id: int
    root: str
    key: str
    step: int | None
    format: str
    state: str
    distance: Annotated[
        int, Shown("Number of jobs in between; negative for ancestors, 0 for the checkpoint itself.")
    ]


@dataclass(frozen=True, slots=True)
class LineageEdge:
    """``child_id`` was made of ``parent_id``."""

    child_id: Annotated[int, Shown("The result.")]
    parent_id: Annotated[int, Shown("The source.")]
    kind: Annotated[str, Shown(examples=("converted_from", "merged_from", "resumed_from"))]
    job_id: Annotated[int | None, Shown("Job that made the result; null: training.")]
    created_at: datetime
    map: Annotated[str | None, Shown("Weight map of the job.")] = None


@dataclass(frozen=True, slots=True)
class Lineage:
    """Ancestors and descendants, nearest first; ``is_cut``: more exist. ``also_in``: checkpoints with the
    same tensors under the same names, by digest."""

    nodes: Annotated[
        tuple[LineageNode, ...], Shown("Ancestors, the checkpoint itself, and descendants; nearest first.")
    ]
    edges: tuple[LineageEdge, ...]
    is_cut: Annotated[bool, Shown("More exist than shown.")]
    also_in: Annotated[
        tuple[LineageNode, ...], Shown("First 50 checkpoints with the same tensors by digest.")
    ] = ()


LineageKind = Literal["converted_from", "merged_from"]
"""Kinds recorded by jobs."""

MAX_NODES: Final = 500
MAX_ALSO_IN: Final = 50

_NODE: Final = (
    checkpoints.c.id,
    roots.c.name.label("root"),
    checkpoints.c.key,
    checkpoints.c.step,
    checkpoints.c.format,
    checkpoints.c.state,
)


def add_lineage(
    connection: Connection,
    child_id: int,
    parent_id: int,
    *,
    kind: LineageKind = "converted_from",
    job_id: int | None = None,
    map: str | None = None,
    now: float | None = None,
) -> None:
    """Record once that a job made ``child`` from ``parent``, through a weight ``map``. A checkpoint is never
    its own parent."""
    if child_id == parent_id:
        raise InvalidQueryError("parent", "a checkpoint cannot be its own parent")
    row = {
        "child_id": child_id,
        "parent_id": parent_id,
        "kind": kind,
        "job_id": job_id,
        "created_seconds": time.time() if now is None else now,
        "map": clean_text(map) if map else None,
    }
    insert_missing(connection, lineage, [row])


def lineage_of(connection: Connection, checkpoint_id: int, visible: frozenset[str] | None = None) -> Lineage:
    """Return ancestors and descendants, nearest first. Raises MissingError if the checkpoint is not visible.

    Leaves out invisible checkpoints, and checkpoints connected through invisible checkpoints only.
    """
    start = get_checkpoint(connection, checkpoint_id, visible)
    nodes = {start.id: _level(connection, [start.id], visible, 0)[0]}
    edges: dict[tuple[int, int, str], LineageEdge] = {}
    is_cut = False
    for direction in (-1, 1):
        level = [start.id]
        distance = 0
        while level:
            distance += direction
            found = _edges(connection, level, direction)
            ends = {edge.parent_id if direction < 0 else edge.child_id for edge in found} - nodes.keys()
            new = _level(connection, ends, visible, distance)
            is_cut = is_cut or len(nodes) + len(new) > MAX_NODES
            new = new[: MAX_NODES - len(nodes)]
            nodes |= {node.id: node for node in new}
            edges |= {(edge.child_id, edge.parent_id, edge.kind): edge for edge in found}
            level = [node.id for node in new]
    kept = [edge for edge in edges.values() if edge.child_id in nodes and edge.parent_id in nodes]
    nearest = sorted(nodes.values(), key=lambda node: (abs(node.distance), node.id))
    also_in = same_tensors(connection, start, visible)
    return Lineage(tuple(nearest), tuple(kept), is_cut, tuple(also_in))


def same_tensors(
    connection: Connection, found: CheckpointDetail, visible: frozenset[str] | None
) -> list[LineageNode]:
    """Return other checkpoints with the same tensors, newest first."""
    if found.content_digest is None:
        return []
    own = checkpoints.c.content_digest == found.content_digest
    is_other = (checkpoints.c.id != found.id) & (checkpoints.c.state == "committed")
    query = _nodes(visible, own & is_other).order_by(checkpoints.c.id.desc()).limit(MAX_ALSO_IN)
    return [LineageNode(**row._mapping, distance=0) for row in connection.execute(query)]


def _edges(connection: Connection, numbers: Iterable[int], direction: int) -> list[LineageEdge]:
    child, parent = checkpoints.alias("child"), checkpoints.alias("parent")
    resumed = (
        select(
            child.c.id.label("child_id"),
            parent.c.id.label("parent_id"),
            literal("resumed_from").label("kind"),
            null().label("job_id"),
            child.c.committed_seconds.label("created_seconds"),
            child.c.provenance["map"].as_string().label("map"),
        )
        .join_from(child, parent, (parent.c.save_id == child.c.resumed_from) & (parent.c.id != child.c.id))
        .where(_end(child.c.id, parent.c.id, direction).in_(sorted(numbers)))
    )
    end = _end(lineage.c.child_id, lineage.c.parent_id, direction)
    noted = select(lineage).where(end.in_(sorted(numbers)))
    both = union_all(noted, resumed).subquery()
    query = select(both).order_by(both.c.child_id, both.c.parent_id, both.c.kind).limit(4 * MAX_NODES)
    return [record_of_row(LineageEdge, row) for row in connection.execute(query)]


def _end(child: ColumnElement[Any], parent: ColumnElement[Any], direction: int) -> ColumnElement[Any]:
    return child if direction < 0 else parent


def _nodes(visible: frozenset[str] | None, condition: ColumnElement[bool]) -> Select[Any]:
    query = select(*_NODE).join_from(checkpoints, roots, roots.c.id == checkpoints.c.root_id).where(condition)
    return query if visible is None else query.where(roots.c.name.in_(sorted(visible)))


def _level(
    connection: Connection, numbers: Iterable[int], visible: frozenset[str] | None, distance: int
) -> list[LineageNode]:
    query = _nodes(visible, checkpoints.c.id.in_(sorted(numbers))).order_by(checkpoints.c.id)
    return [LineageNode(**row._mapping, distance=distance) for row in connection.execute(query)]
