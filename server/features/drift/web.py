"""The drift of a run: its JSON, the forms that compute it, and the page with its heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import Field

from dcp.server.catalog.inputs import Query as QueryModel
from dcp.server.catalog.names import is_of_optimizer
from dcp.server.catalog.runs import get_run
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.problems import NotFoundError
from dcp.server.features.drift import feature
from dcp.server.features.drift.job import DriftKind, DriftParams
from dcp.server.features.drift.picture import DriftValue, drift_picture
from dcp.server.records.declaring import Shown
from dcp.server.records.documents import record_of
from dcp.server.records.jobs import Job


@dataclass(frozen=True, slots=True)
class DriftStep:
    """Two neighbouring steps: checkpoint ``b`` at ``step``, and ``a`` at ``from_step``. ``added`` and
    ``removed`` count tensors. ``problem``: the reason why they could not be compared."""

    a: int
    b: int
    from_step: int | None
    step: int | None
    problem: str | None
    added: int = 0
    removed: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class DriftLayer:
    """The tensors of one layer, or of ``layers`` neighbouring ones where there are very many, by step.

    ``relative_l2``: the root mean square of theirs, weighed by elements. ``changed``: the share of elements
    that are not the same. ``nonfinite``: NaN or infinite elements after the step, also of tensors that are
    as they were when these came in. A step after which all elements of the layer are such has no
    ``relative_l2``.
    """

    name: str
    relative_l2: tuple[float | None, ...]
    changed: tuple[float | None, ...]
    nonfinite: tuple[int | None, ...]
    layers: Annotated[
        int, Shown("Neighbouring ones are one where there are very many.", may_be_absent=True)
    ] = 1


@dataclass(frozen=True, slots=True)
class RunDrift:
    """Changes of a run's tensors between steps, as a job found them. ``layers``: at most 512 rows, which
    cover all ``layer_count`` layers."""

    run_id: int
    job_id: int
    created_at: datetime
    steps: tuple[DriftStep, ...]
    layers: tuple[DriftLayer, ...]
    layer_count: int


@feature.get("/runs/{run_id}/drift", tag="runs")
def get_run_drift(run_id: IdPath, ask: Ask) -> RunDrift:
    """The result of the last job; not found before the first one, and once that job is forgotten."""
    ask.find(get_run, run_id, ask.visible)
    found = _found(run_id, ask)
    if found is None:
        raise NotFoundError(f"no drift of run {run_id} is kept; POST here to compute it")
    return found


def _found(run_id: int, ask: Ask) -> RunDrift | None:
    job = ask.last_result(DriftKind, DriftParams(run_id=run_id))
    if job is None or job.result is None:
        return None
    return record_of(RunDrift, job.result, job_id=job.id, created_at=job.created_at)


@feature.post("/runs/{run_id}/drift", tag="runs", scope="read", status=202, errors=(404, 409))
def compute_run_drift(run_id: IdPath, ask: Ask) -> Job:
    """Compute it for up to 50 steps, by a job; `POST /jobs` with the kind `drift` chooses the steps."""
    return ask.submit(DriftKind, DriftParams(run_id=run_id))


class DriftView(QueryModel):
    """The value that is shown, and the layers: ``count`` of them from ``first`` on."""

    value: DriftValue = "relative_l2"
    of: Literal["weights", "all"] = "weights"
    first: Annotated[int, Field(ge=0, le=10**6)] = 0
    count: Annotated[int, Field(ge=1, le=10**6)] | None = None
    done: Annotated[str, Field(max_length=32)] | None = None


@feature.page("/runs/{run_id}/drift", "drift.html")
def drift_page(run_id: IdPath, view: Annotated[DriftView, Query()], ask: Ask) -> dict[str, Any]:
    """The result of the last job, and the progress of a running one."""
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
    """The layers without optimizer states, whose changes are much larger than those of weights."""
    return [one for one in drift.layers if not is_of_optimizer(one.name)]


@feature.form("/runs/{run_id}/drift", scope="read")
def compute_drift_form(run_id: IdPath, ask: Ask) -> str:
    """Compute it for up to 50 steps."""
    compute_run_drift(run_id, ask)
    return f"/runs/{run_id}/drift"
