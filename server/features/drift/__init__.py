"""Drift: changes of a run's tensors between neighbouring steps, computed by a job (kind ``drift``)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import Field
from sqlalchemy import Connection

from dcp.server.catalog.errors import StateError
from dcp.server.catalog.inputs import Id, Step
from dcp.server.catalog.names import in_order, layer_of
from dcp.server.catalog.runs import get_run
from dcp.server.catalog.timeline import steps_of_run
from dcp.server.core.feature import Feature, Link
from dcp.server.core.jobs.kind import Globs, JobContext, JobPlan, Kind, Parameters, ReportProgress, TaskSpec
from dcp.server.core.jobs.ledger.rows import JobSpec, Json
from dcp.server.core.jobs.subjects import Subject, find_subject, read_tensors
from dcp.server.core.problems import ProblemError
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings

if TYPE_CHECKING:
    from dcp.inspection.values.difference import Difference
    from dcp.storage.formats.index import CheckpointIndex


_MAX_LAYERS: Final = 512


class DriftParams(Parameters):
    """Up to ``points`` evenly spaced committed steps of a run from ``min_step`` to ``max_step``, in one
    ``format`` (default: the format of the last step)."""

    run_id: Id
    min_step: Step | None = Field(default=None, description="Lowest step, inclusive.")
    max_step: Step | None = Field(default=None, description="Highest step, inclusive.")
    points: Annotated[int, Field(ge=2, le=200)] = Field(
        default=50, description="Maximum number of steps, evenly spaced."
    )
    format: Annotated[str, Field(min_length=1, max_length=32)] | None = Field(
        default=None, description="Format of the checkpoints; default: the format of the last step."
    )
    only: Globs | None = Field(default=None, description="Globs of names to compare; default: all.")
    exclude: Globs | None = Field(default=None, description="Globs of names to leave out.")


class DriftKind(Kind[DriftParams]):
    """A task for each two neighbours; the result is a row for each layer."""

    name: ClassVar[str] = "drift"
    about: ClassVar[str] = "Compare neighbouring steps of a run, layer by layer."
    scope: ClassVar[Scope] = "read"
    params = DriftParams
    preload: ClassVar[tuple[str, ...]] = (
        "dcp.inspection.values.difference",
        "dcp.inspection.values.statistics",
        "dcp.inspection.values.tensor_reading",
    )

    @classmethod
    def result_key(cls, params: DriftParams) -> str:
        """Return a key per run: the page shows the last result of any parameters."""
        return f"drift:{params.run_id}"

    def specify(
        self, connection: Connection, params: DriftParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        run = get_run(connection, params.run_id, caller.roots)
        _chosen(connection, params)
        return self.new_job(params, caller.name, root=run.root)

    def prepare(self, connection: Connection, params: DriftParams) -> Json:
        """As `Kind.prepare`."""
        return {"subjects": [find_subject(connection, one).to_json() for one in _chosen(connection, params)]}

    def plan(self, context: JobContext, params: DriftParams) -> JobPlan:
        """As `Kind.plan`."""
        subjects = context.prepared["subjects"]
        shared = {"only": params.only, "exclude": params.exclude}
        tasks = [
            TaskSpec(
                payload={"a": a, "b": b, "is_first": number == 0, **shared},
                weight_bytes=a["bytes"] + b["bytes"],
            )
            for number, (a, b) in enumerate(pairwise(subjects))
        ]
        return JobPlan(tasks=tasks, plan_data={"run_id": params.run_id})

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`. An unreadable step gets a ``problem``; other steps are compared."""
        a, b = Subject(**payload["a"]), Subject(**payload["b"])
        step = {"a": a.id, "b": b.id, "from_step": a.step, "step": b.step, "problem": None}
        try:
            found, elements, before = _compare(context, a, b, payload, report_progress)
        except ProblemError as error:
            _raise_passing(error)
            nothing = {"added": 0, "removed": 0, "bytes_read": 0}
            return {
                "step": {**step, **nothing, "problem": error.detail},
                "layers": {},
                "nonfinite": None,
                "before": _nonfinite_of(context, b, payload),
            }
        return {
            "step": {
                **step,
                "added": sum(one.kind == "added" for one in found.tensors),
                "removed": sum(one.kind == "removed" for one in found.tensors),
                "bytes_read": found.bytes_read,
            },
            "layers": _layers(found, elements),
            "nonfinite": _nonfinite(found),
            "before": before,
        }

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        _carry_nonfinite(results)
        names = sorted({name for result in results for name in result["layers"]}, key=in_order)
        size = -(-len(names) // _MAX_LAYERS) or 1
        bins = [names[begin : begin + size] for begin in range(0, len(names), size)]
        return {
            "run_id": plan_data["run_id"],
            "steps": [result["step"] for result in results],
            "layers": [_row(one, [result["layers"] for result in results]) for one in bins],
            "layer_count": len(names),
        }


def _chosen(connection: Connection, params: DriftParams) -> list[int]:
    found = steps_of_run(
        connection,
        params.run_id,
        min_step=params.min_step,
        max_step=params.max_step,
        format=params.format,
    )
    if len(found) < 2:
        raise StateError(
            f"run {params.run_id} has fewer than two committed steps to compare", state="too few steps"
        )
    count = min(params.points, len(found))
    return [found[place * (len(found) - 1) // (count - 1)] for place in range(count)]


def _compare(
    context: JobContext, a: Subject, b: Subject, payload: Json, report_progress: ReportProgress
) -> tuple[Difference, Mapping[str, int], Mapping[str, int]]:
    """Return the difference, the elements per tensor of ``b``, and for the first two steps the nonfinite
    elements of unchanged tensors, which no other task reads."""
    from dcp.inspection.values.difference import diff
    from dcp.inspection.values.statistics import statistics_of_row

    with read_tensors(context, a, b) as [(before, _), (after, _)]:
        found = diff(
            before,
            after,
            only=payload["only"],
            exclude=payload["exclude"],
            progress=lambda done, total: report_progress(done),
        )
        counts = {}
        for fqn in found.equal if payload.get("is_first") else ():
            statistics = statistics_of_row(before, before.index.position[fqn])
            counts[fqn] = 0 if statistics is None else statistics.nans + statistics.infs
    return found, _elements(after.index), {fqn: count for fqn, count in counts.items() if count}


def _nonfinite_of(context: JobContext, b: Subject, payload: Json) -> Mapping[str, int]:
    """Return nonfinite elements of the tensors of ``b`` for the next step, after a failed comparison with the
    previous step. Empty if ``b`` is unreadable."""
    try:
        return _compare(context, b, b, {**payload, "is_first": True}, lambda done: None)[2]
    except ProblemError as error:
        _raise_passing(error)
        return {}


def _raise_passing(error: ProblemError) -> None:
    """Raise a temporary error, to retry the task."""
    if error.status >= 500 or error.status == 429:
        raise error


def _elements(index: CheckpointIndex) -> dict[str, int]:
    return {fqn: math.prod(index.shape(row)) for row, fqn in enumerate(index.fqns)}


# -- layers --------------------------------------------------------------------------------------------------


_SUMS: Final = ("elements", "compared", "differing", "nonfinite", "squares")
"""Sums over the tensors of a layer; "squares" are of the distances of "compared" elements."""

_Sums = dict[str, float]


def _no_sums() -> _Sums:
    return dict.fromkeys(_SUMS, 0)


def _add(sums: _Sums, **more: float) -> None:
    for name, value in more.items():
        sums[name] += value


def _changed(sums: _Sums) -> float | None:
    """Return the share of changed elements."""
    return sums["differing"] / sums["elements"] if sums["elements"] else None


def _relative_l2(sums: _Sums) -> float | None:
    """Return the root mean square of the relative L2 of the tensors, weighed by elements; None where all are
    NaN or infinite."""
    is_known = sums["compared"] and sums["nonfinite"] < sums["elements"]
    return math.sqrt(sums["squares"] / sums["compared"]) if is_known else None


def _layers(found: Difference, elements: Mapping[str, int]) -> dict[str, _Sums]:
    """Return sums by layer. A tensor of zeros has no relative L2."""
    layers: defaultdict[str, _Sums] = defaultdict(_no_sums)
    for fqn in found.equal:
        count = elements.get(fqn, 0)
        _add(layers[layer_of(fqn)], elements=count, compared=count)
    for one in found.tensors:
        if one.values is None:
            continue
        values, layer = one.values, layers[layer_of(one.fqn)]
        _add(layer, elements=values.elements, differing=values.differing, nonfinite=values.nonfinite_after)
        distance = values.relative_l2
        if distance is not None and math.isfinite(distance):
            _add(layer, compared=values.elements, squares=values.elements * distance**2)
    return dict(layers)


def _nonfinite(found: Difference) -> dict[str, int]:
    """Return nonfinite elements after the step by name, for tensors with such elements before or after; 0 for
    tensors without a comparison. Unchanged tensors keep their number."""
    return {
        one.fqn: 0 if one.values is None else one.values.nonfinite_after
        for one in found.tensors
        if one.values is None or one.values.nonfinite or one.values.nonfinite_after
    }


def _carry_nonfinite(results: Sequence[Json]) -> None:
    """Carry nonfinite elements to later steps: a NaN tensor does not change, and unchanged tensors are not
    read."""
    present: dict[str, int] = {}
    for result in results:
        if result["nonfinite"] is None:  # could not be compared
            present = dict(result["before"])
            continue
        present |= result["before"]
        for fqn, count in present.items():
            layer = result["layers"].get(layer_of(fqn))
            if fqn not in result["nonfinite"] and layer is not None:
                layer["nonfinite"] += count
        present |= result["nonfinite"]
        present = {fqn: count for fqn, count in present.items() if count}


def _row(names: Sequence[str], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a layer, or of several adjacent layers, by step."""
    found = [_joined([layers[name] for name in names if name in layers]) for layers in steps]
    columns = {
        "relative_l2": [one and _relative_l2(one) for one in found],
        "changed": [one and _changed(one) for one in found],
        "nonfinite": [one and one["nonfinite"] for one in found],
    }
    name = names[0] if len(names) == 1 else f"{names[0]} \N{HORIZONTAL ELLIPSIS} {names[-1]}"
    return {"name": name, "layers": len(names), **columns}


def _joined(layers: Sequence[Mapping[str, Any]]) -> _Sums | None:
    whole = _no_sums()
    for one in layers:
        _add(whole, **one)
    return whole if layers else None


feature: Final = Feature(
    "drift",
    __name__,
    kinds=[DriftKind()],
    web=["heat_map"],
    links=[Link("run", "Changes between steps", "/runs/{id}/drift")],
)
