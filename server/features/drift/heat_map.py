"""Drift of a run: JSON, and a heat map with layers as rows and pairs of steps as columns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Annotated, Any, Final, Literal

from fastapi import Query
from pydantic import Field

from dcp.server.catalog.inputs import Query as QueryModel
from dcp.server.catalog.names import is_of_optimizer
from dcp.server.catalog.runs import get_run
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.problems import NotFoundError
from dcp.server.database.mapping import record_of
from dcp.server.features.drift import DriftKind, DriftParams, feature
from dcp.server.records.declaring import Shown
from dcp.server.records.jobs import Job


@dataclass(frozen=True, slots=True)
class DriftStep:
    """Two neighbouring steps: checkpoint ``b`` at ``step``, and ``a`` at ``from_step``. ``added`` and
    ``removed`` count tensors. ``problem``: the reason why they could not be compared."""

    a: Annotated[int, Shown("The `id` of the earlier checkpoint.")]
    b: Annotated[int, Shown("The `id` of the later checkpoint.")]
    from_step: Annotated[int | None, Shown("Step of `a`.")]
    step: Annotated[int | None, Shown("Step of `b`.")]
    problem: Annotated[str | None, Shown("Reason why the steps could not be compared; null: none.")]
    added: Annotated[int, Shown("Tensors only in `b`.")] = 0
    removed: Annotated[int, Shown("Tensors only in `a`.")] = 0
    bytes_read: Annotated[int, Shown("Bytes read for the comparison.")] = 0


@dataclass(frozen=True, slots=True)
class DriftLayer:
    """Tensors of one layer, or of ``layers`` adjacent layers, by step.

    ``relative_l2``: root mean square weighted by elements; None if all elements are NaN or infinite.
    ``changed``: share of changed elements. ``nonfinite``: NaN or infinite elements after the step, including
    unchanged tensors.
    """

    name: Annotated[str, Shown("Name of the layer, or of the first of several.")]
    relative_l2: Annotated[
        tuple[float | None, ...], Shown("By step: relative L2 change; null: no finite elements.")
    ]
    changed: Annotated[tuple[float | None, ...], Shown("By step: share of changed elements, from 0 to 1.")]
    nonfinite: Annotated[tuple[int | None, ...], Shown("By step: number of NaN or infinite elements.")]
    layers: Annotated[int, Shown("Adjacent layers merged into this row.", may_be_absent=True)] = 1


@dataclass(frozen=True, slots=True)
class RunDrift:
    """Changes of a run's tensors between steps, as a job found them. ``layers``: at most 512 rows, which
    cover all ``layer_count`` layers."""

    run_id: int
    job_id: int
    created_at: datetime
    steps: Annotated[tuple[DriftStep, ...], Shown("Neighbouring steps, the columns of `layers`.")]
    layers: Annotated[tuple[DriftLayer, ...], Shown("At most 512 rows.")]
    layer_count: Annotated[int, Shown("Number of layers in all rows.")]


@feature.get("/runs/{run_id}/drift", tag="runs")
def get_run_drift(run_id: IdPath, ask: Ask) -> RunDrift:
    """Return the result of the last job. Not found before the first job, or after the job was deleted."""
    ask.find(get_run, run_id, ask.visible)
    found = _found(run_id, ask)
    if found is None:
        raise NotFoundError(f"the drift of run {run_id} is not computed yet; send a POST to this path")
    return found


def _found(run_id: int, ask: Ask) -> RunDrift | None:
    job = ask.last_result(DriftKind, DriftParams(run_id=run_id))
    if job is None or job.result is None:
        return None
    return record_of(RunDrift, job.result, job_id=job.id, created_at=job.created_at)


@feature.post("/runs/{run_id}/drift", tag="runs", scope="read", status=202, errors=(404, 409))
def compute_run_drift(run_id: IdPath, ask: Ask) -> Job:
    """Submit a job for up to 50 steps; `POST /jobs` with the kind `drift` selects steps."""
    return ask.submit(DriftKind, DriftParams(run_id=run_id))


class DriftView(QueryModel):
    """Displayed value, and ``count`` layers starting at ``first``."""

    value: DriftValue = "relative_l2"
    of: Literal["weights", "all"] = "weights"
    first: Annotated[int, Field(ge=0, le=10**6)] = 0
    count: Annotated[int, Field(ge=1, le=10**6)] | None = None
    done: Annotated[str, Field(max_length=32)] | None = None


@feature.page("/runs/{run_id}/drift", "drift.html")
def drift_page(run_id: IdPath, view: Annotated[DriftView, Query()], ask: Ask) -> dict[str, Any]:
    """Show the result of the last job, and the progress of a running job."""
    run = ask.find(get_run, run_id, ask.visible)
    drift = _found(run_id, ask)
    layers = _of(drift, view)
    return {
        "twin": f"/api/v1/runs/{run_id}/drift" if drift else f"/api/v1/runs/{run_id}",
        "run": run,
        "view": view,
        "drift": drift,
        "picture": drift and drift_picture(layers, len(drift.steps), view.value, view.first, view.count),
        "layer_count": len(layers),
        "has_optimizer": drift is not None and len(_weights(drift)) not in (0, len(drift.layers)),
        "lost": [one for one in drift.steps if one.problem] if drift else [],
        "job": ask.last_job(DriftKind, DriftParams(run_id=run_id), drift.job_id if drift else 0),
    }


def _of(drift: RunDrift | None, view: DriftView) -> Sequence[DriftLayer]:
    if drift is None:
        return ()
    return _weights(drift) or drift.layers if view.of == "weights" else drift.layers


def _weights(drift: RunDrift) -> list[DriftLayer]:
    """Return layers without optimizer states, which change much more than weights."""
    return [one for one in drift.layers if not is_of_optimizer(one.name)]


@feature.form("/runs/{run_id}/drift", scope="read")
def compute_drift_form(run_id: IdPath, ask: Ask) -> str:
    """Submit a job for up to 50 steps."""
    compute_run_drift(run_id, ask)
    return f"/runs/{run_id}/drift"


DriftValue = Literal["relative_l2", "changed"]

_ROWS: Final = 64
_GROUPS: Final = 16
_LEVELS: Final = 8
_DECADES: Final = 4
"""Distances more decades below the maximum have the lowest level."""


@dataclass(frozen=True, slots=True)
class DriftRow:
    """Layers from ``first`` on, ``count`` of them, with the maximum of their values. ``y``: the row in
    the picture; a heading (``count`` 0) has no values."""

    y: int
    label: str
    name: str
    first: int
    count: int
    values: tuple[float | None, ...] = ()
    nonfinite: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class DriftPicture:
    """Picture: ``paths`` has the cells of each level, "l0" (no change) to "l8", and "nan" cells, as one path
    each with a unit per cell. ``edges`` are the minimum values of levels from l1. ``maximum`` and
    ``first_nonfinite``: row and column of the maximum and of the first NaN or infinity."""

    rows: tuple[DriftRow, ...]
    height: int
    width: int
    paths: Mapping[str, str]
    edges: tuple[float, ...]
    maximum: tuple[DriftRow, int] | None
    first_nonfinite: tuple[DriftRow, int] | None


def drift_picture(
    layers: Sequence[Any], width: int, value: DriftValue, first: int = 0, count: int | None = None
) -> DriftPicture:
    """Return the picture of the layers of a `RunDrift` over ``width`` pairs of steps; of ``count`` layers
    from ``first`` on."""
    end = len(layers) if count is None else min(len(layers), first + count)
    rows = tuple(_rows(layers, range(min(first, end), end), value))
    edges = _edges([each for row in rows for each in row.values if each], value)
    cells = [
        (f"l{_level(each, edges)}", row, x)
        for row in rows
        for x, (each, wrong) in enumerate(zip(row.values, row.nonfinite, strict=True))
        if each is not None and (each or not wrong)  # a cell with NaN does not count as unchanged
    ]
    flags = [("nan", row, x) for row in rows for x, each in enumerate(row.nonfinite) if each]
    known = [(each, row, x) for row in rows for x, each in enumerate(row.values) if each]
    top = max(known, key=lambda one: one[0], default=None)
    first_flag = min(flags, key=lambda one: one[2], default=None)
    return DriftPicture(
        rows,
        len(rows),
        width,
        _paths(cells + flags),
        edges,
        top and (top[1], top[2]),
        first_flag and (first_flag[1], first_flag[2]),
    )


def _paths(cells: Iterable[tuple[str, DriftRow, int]]) -> dict[str, str]:
    found: dict[str, list[str]] = defaultdict(list)
    for kind, row, x in cells:
        found[kind].append(f"M{x} {row.y}h1v1h-1z")
    return {kind: "".join(parts) for kind, parts in sorted(found.items())}


# -- rows ----------------------------------------------------------------------------------------------------


def _rows(layers: Sequence[Any], places: range, value: DriftValue) -> Iterable[DriftRow]:
    """Yield rows, with headings for common prefixes of names, and bins below headings."""
    groups = [
        (group, [*members]) for group, members in groupby(places, key=lambda at: _parted(layers[at].name)[0])
    ]
    has_headings = len(groups) <= min(_GROUPS, len(places) // 2)
    if not has_headings:
        groups = [("", [*places])] if len(places) else []
    size = -(-len(places) // _ROWS) or 1
    y = 0
    for group, members in groups:
        if has_headings and group:
            yield DriftRow(y, group, group, members[0], 0)
            y += 1
        for begin in range(0, len(members), size):
            yield _row(y, layers, members[begin : begin + size], value, is_short=has_headings)
            y += 1


def _parted(name: str) -> tuple[str, str]:
    before, _, last = name.rpartition(".")
    return before, last


def _row(
    y: int, layers: Sequence[Any], members: Sequence[int], value: DriftValue, *, is_short: bool
) -> DriftRow:
    some = [layers[at] for at in members]
    ends = [some[0].name, some[-1].name]
    name = ends[0] if len(some) == 1 else " \N{EN DASH} ".join(ends)
    label = " \N{EN DASH} ".join([_parted(one)[1] for one in ends][: len(some)]) if is_short else name
    return DriftRow(
        y,
        label,
        name,
        members[0],
        len(some),
        tuple(map(_maximum, zip(*(getattr(one, value) for one in some), strict=True))),
        tuple(map(_maximum, zip(*(one.nonfinite for one in some), strict=True))),
    )


def _maximum(values: Iterable[Any]) -> Any:
    return max((one for one in values if one is not None), default=None)


# -- levels --------------------------------------------------------------------------------------------------


def _edges(values: Sequence[float], value: DriftValue) -> tuple[float, ...]:
    """Return the lower ends of the levels: shares by equal parts, distances by equal factors."""
    if not values:
        return ()
    if value == "changed":
        return tuple(level / _LEVELS for level in range(_LEVELS))
    high = max(values)
    low = max(min(values), high / 10**_DECADES)
    factor = (high / low) ** (1 / _LEVELS)
    return tuple(low * factor**level for level in range(_LEVELS)) if factor > 1 else (low,)


def _level(value: float, edges: Sequence[float]) -> int:
    """Return the level of a value: 0 without change, then levels of ``edges`` from 1."""
    if not value or math.isnan(value):
        return 0
    return max(1, sum(value >= edge * (1 - 1e-9) for edge in edges))
