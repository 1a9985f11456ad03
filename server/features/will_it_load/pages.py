"""Will it load? A checkpoint beside the state that is to take it: of a checkpoint, a model, pasted text."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcp.planners.weight_maps.weight_map import ready_maps
from dcp.server.catalog.details import keys_of
from dcp.server.core.answers import IdPath
from dcp.server.core.data.access import DataDep
from dcp.server.core.http.dependencies import Author, Caller, Db, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.inputs import MAX_ID
from dcp.server.core.jobs.submitting import submit_kind
from dcp.server.core.pages.queries import READ, pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import Form, FormDep
from dcp.server.core.problems import NotFoundError, ProblemError, UnprocessableError
from dcp.server.features.checkpoints import api as checkpoints_api
from dcp.server.features.checkpoints.queries import CheckpointQuery
from dcp.server.features.jobs import api as jobs_api
from dcp.server.features.tensors.answers import LoadCheckAnswer, LoadProblemAnswer
from dcp.server.features.will_it_load import api
from dcp.server.features.will_it_load.job import ShapesParams
from dcp.server.features.will_it_load.maps import MapChoice

__all__ = ["router"]

router = pages_router()

_PATH: Final = "/checkpoints/{checkpoint_id}/will-it-load"
_OFFERED: Final = 30
_ROWS: Final = 100

_Number = Annotated[int, Field(ge=1, le=MAX_ID)]


class FitView(BaseModel):
    """The state of which checkpoint, or which a job has found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_of: _Number | None = None
    shapes_job: _Number | None = None
    map: Annotated[str, Field(max_length=256)] | None = None
    inverse: bool = False
    below: Annotated[str, Field(max_length=1024)] | None = None
    done: Annotated[str, Field(max_length=32)] | None = None

    @property
    def through(self) -> MapChoice:
        """A form sends what is left empty, too."""
        return MapChoice(self.map or None, self.inverse, self.below or None)


@router.get(_PATH, dependencies=READ)
def will_it_load_page(
    checkpoint_id: IdPath,
    view: Annotated[FitView, Query()],
    request: Request,
    database: Db,
    data: DataDep,
    service: ServiceDep,
    caller: Caller,
) -> Response:
    """The answer for the state in the address; without one how it is given."""
    job, check = None, None
    if view.shapes_job is not None:
        job = jobs_api.get_job(view.shapes_job, database, caller)
        if job.kind != "shapes":
            raise NotFoundError(f"job {job.id} tells of no state")
    if view.state_of is not None or (job is not None and job.state == "succeeded"):
        try:
            check = api.check_load_of(
                checkpoint_id, data, database, service, caller, view.through, view.state_of, view.shapes_job
            )
        except UnprocessableError as problem:
            return _page(request, checkpoint_id, view, database, caller, None, job=job, fault=problem)
    query = request.url.query
    twin = f"/api/v1{request.url.path}?{query}" if check else f"/api/v1/checkpoints/{checkpoint_id}"
    return _page(request, checkpoint_id, view, database, caller, check, job=job, twin=twin)


@router.post(_PATH, dependencies=[requires("read")])
def will_it_load_form(
    checkpoint_id: IdPath,
    form: FormDep,
    request: Request,
    database: Db,
    data: DataDep,
    service: ServiceDep,
    author: Author,
    caller: Caller,
    transact: IdempotentDep,
) -> Response:
    """The answer for what was pasted; of a config.json a job makes the model, and the page follows it."""
    from dcp.server.features.will_it_load.states import (  # only here: they import numpy
        document_of_text,
        is_config,
    )

    text = form.text("text")
    view = _view_of(form)
    try:
        view.through.check()
        document = document_of_text(text)
        if is_config(document):
            job = submit_kind(
                "shapes", _params(checkpoint_id, document), service, author, transact, Response()
            )
            chosen = view.model_dump(include={"map", "inverse", "below"}, exclude_defaults=True)
            query = urlencode({"shapes_job": job.id, **chosen})
            return RedirectResponse(f"{request.url.path}?{query}", 303)
        check = api.check_document(checkpoint_id, document, data, service, caller, view.through)
    except UnprocessableError as problem:
        return _page(request, checkpoint_id, view, database, caller, None, text=text, fault=problem)
    return _page(request, checkpoint_id, view, database, caller, check, text=text)


def _view_of(form: Form) -> FitView:
    try:
        return FitView(
            map=form.optional("map"), inverse=form.is_checked("inverse"), below=form.optional("below")
        )
    except ValidationError as error:
        (first, *_) = error.errors()
        raise UnprocessableError(f"{first['loc'][0]}: {first['msg']}", field=str(first["loc"][0])) from None


def _params(checkpoint_id: int, config: dict[str, Any]) -> ShapesParams:
    try:
        return ShapesParams(checkpoint_id=checkpoint_id, config=config)
    except ValidationError as error:
        raise UnprocessableError(f"config.json: {error.errors()[0]['msg']}", field="text") from None


def _page(
    request: Request,
    checkpoint_id: int,
    view: FitView,
    database: Db,
    caller: Caller,
    check: LoadCheckAnswer | None,
    **others: Any,
) -> Response:
    found = checkpoints_api.get_checkpoint(checkpoint_id, database, caller, Response())
    recent = checkpoints_api.list_checkpoints(CheckpointQuery(sort="-time", limit=_OFFERED), database, caller)
    fault: ProblemError | None = others.pop("fault", None)
    findings = check and (check.renamed or check.plain)
    return page(
        request,
        "will_it_load.html",
        200 if fault is None else fault.status,
        **{"job": None, "text": "", "twin": f"/api/v1/checkpoints/{checkpoint_id}", **others},
        found=found,
        view=view,
        maps=list(ready_maps()),
        check=check,
        findings=findings,
        state_name=None if view.state_of is None else _name(view.state_of, database, caller),
        listed=_by_kind(findings.problems) if findings else {},
        fault=fault and fault.detail,
        offered=[one for one in recent.items if one.id != checkpoint_id],
    )


def _name(checkpoint_id: int, database: Db, caller: Caller) -> str:
    with database.read() as connection:
        return keys_of(connection, [checkpoint_id], caller.roots).get(checkpoint_id, str(checkpoint_id))


def _by_kind(problems: list[LoadProblemAnswer]) -> dict[str, list[LoadProblemAnswer]]:
    found: dict[str, list[LoadProblemAnswer]] = {}
    for one in problems:
        rows = found.setdefault(one.kind, [])
        if len(rows) < _ROWS:
            rows.append(one)
    return found
