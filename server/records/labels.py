"""Aliases, metrics over the steps of a run, and where checkpoints come from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from dcp.server.records.declaring import Shown

__all__ = ["Alias", "Lineage", "LineageEdge", "LineageNode", "Series", "SeriesPoint"]


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that moves from checkpoint to checkpoint of a run. ``is_protected``: only admins move it."""

    run_id: int
    name: str
    checkpoint_id: int
    is_protected: bool
    updated_at: datetime
    updated_by: str | None
    etag: str


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """Neighbouring checkpoints of a run, ``count`` of them; ``checkpoint_id`` is of one."""

    checkpoint_id: Annotated[int, Shown("Of one of them.")]
    first_step: int
    last_step: int
    last_at: Annotated[datetime, Shown("When the newest was committed.")]
    count: int
    min: float
    max: float
    mean: float


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over the steps of a run; ``count`` checkpoints have it as a finite number."""

    run_id: int
    metric: str
    count: Annotated[int, Shown("Checkpoints with a step and this metric.")]
    points: tuple[SeriesPoint, ...]
    nonfinite_count: Annotated[
        int, Shown("Checkpoints with a step of which it is NaN or infinite.", may_be_absent=True)
    ] = 0
    first_nonfinite_step: Annotated[int | None, Shown("The first of these.", may_be_absent=True)] = None
    last_nonfinite_step: Annotated[int | None, Shown("The last of these.", may_be_absent=True)] = None


@dataclass(frozen=True, slots=True)
class LineageNode:
    """A checkpoint; ``distance`` is negative for ancestors of the requested one."""

    id: int
    root: str
    key: str
    step: int | None
    format: str
    state: str
    distance: Annotated[int, Shown("In steps of making; negative for what it comes from, 0 is itself.")]


@dataclass(frozen=True, slots=True)
class LineageEdge:
    """``child_id`` was made of ``parent_id``."""

    child_id: int
    parent_id: int
    kind: Annotated[str, Shown(examples=("converted_from", "merged_from", "resumed_from"))]
    job_id: int | None
    created_at: datetime
    map: Annotated[str | None, Shown("The weight map that it was made through.")] = None


@dataclass(frozen=True, slots=True)
class Lineage:
    """Ancestors and descendants, nearest first; ``is_cut``: there are more. ``also_in``: what has the same
    tensors under the same names, wherever it comes from, by their digests."""

    nodes: tuple[LineageNode, ...]
    edges: tuple[LineageEdge, ...]
    is_cut: Annotated[bool, Shown("There are more than are shown.")]
    also_in: Annotated[
        tuple[LineageNode, ...], Shown("The first 50 that have the same tensors, by their digests.")
    ] = ()
