"""How the layers of a run change from step to step: the drift strip, and the job that finds it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.catalog.contents.layers import is_of_optimizer
from dcp.server.http.dependencies import Author, Caller, Db, ServiceDep, requires
from dcp.server.http.idempotent_transaction import IdempotentDep
from dcp.server.jobs.kinds.drift import DriftParams
from dcp.server.pages.drawings.drift import DriftValue, drift_picture
from dcp.server.pages.queries import READ, pages_router
from dcp.server.pages.rendering import page
from dcp.server.pages.routes.jobs import last_job
from dcp.server.pages.tokens import FormDep
from dcp.server.problems import NotFoundError
from dcp.server.routes.catalog import runs as runs_api
from dcp.server.routes.jobs import drift as api
from dcp.server.schemas.common import IdPath
from dcp.server.schemas.contents.drawings import DriftAnswer, DriftLayerAnswer

__all__ = ["router"]

router = pages_router()


class DriftView(BaseModel):
    """Which value is shown, of which names; of ``count`` layers from ``first`` on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: DriftValue = "relative_l2"
    of: Literal["weights", "all"] = "weights"
    first: Annotated[int, Field(ge=0, le=10**6)] = 0
    count: Annotated[int, Field(ge=1, le=10**6)] | None = None
    done: Annotated[str, Field(max_length=32)] | None = None


@router.get("/runs/{run_id}/drift", dependencies=READ)
def drift_page(
    run_id: IdPath, view: Annotated[DriftView, Query()], request: Request, database: Db, caller: Caller
) -> Response:
    """What a job found last, and one that is at work on it."""
    run = runs_api.get_run(run_id, database, caller)
    try:
        drift = api.get_run_drift(run_id, database, caller)
    except NotFoundError:
        drift = None
    key = DriftParams(run_id=run_id).dedup_key
    layers = _of(drift, view)
    picture = drift and drift_picture(layers, len(drift.steps), view.value, view.first, view.count)
    return page(
        request,
        "drift.html",
        twin=f"/api/v1/runs/{run_id}/drift" if drift else f"/api/v1/runs/{run_id}",
        run=run,
        view=view,
        drift=drift,
        picture=picture,
        layer_count=len(layers),
        has_optimizer=drift is not None and len(_weights(drift)) not in (0, len(drift.layers)),
        lost=[one for one in drift.steps if one.problem] if drift else [],
        job=last_job("drift", key, database, caller, drift.job_id if drift else None),
    )


def _of(drift: DriftAnswer | None, view: DriftView) -> Sequence[DriftLayerAnswer]:
    if drift is None:
        return []
    return _weights(drift) or drift.layers if view.of == "weights" else drift.layers


def _weights(drift: DriftAnswer) -> list[DriftLayerAnswer]:
    """Without what optimizers keep: moments move by much more than weights, and would outshine them."""
    return [one for one in drift.layers if not is_of_optimizer(one.name)]


@router.post("/runs/{run_id}/drift", dependencies=[requires("read")])
def compute_drift_form(
    run_id: IdPath, form: FormDep, service: ServiceDep, author: Author, transact: IdempotentDep
) -> Response:
    """Have it found out, of up to 50 steps."""
    api.compute_run_drift(run_id, service, author, transact, Response())
    return RedirectResponse(f"/runs/{run_id}/drift", 303)
