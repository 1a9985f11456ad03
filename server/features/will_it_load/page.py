"""The page "Will it load?": a checkpoint checked against another one, a model, or pasted text."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcp.planners.weight_maps.weight_map import ready_maps
from dcp.server.catalog.details import get_checkpoint, keys_of
from dcp.server.catalog.queries.listing import CheckpointFilter, list_checkpoints
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.inputs import MAX_ID
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import Form, FormDep
from dcp.server.core.problems import NotFoundError, UnprocessableError
from dcp.server.features.convert.options import MapChoice
from dcp.server.features.will_it_load import feature
from dcp.server.features.will_it_load.api import check_document, check_load_of, check_map
from dcp.server.features.will_it_load.job import ShapesKind, ShapesParams
from dcp.server.records.contents import LoadCheck, LoadProblem

_PATH: Final = "/checkpoints/{checkpoint_id}/will-it-load"
_OFFERED: Final = 30
_ROWS: Final = 100

_Number = Annotated[int, Field(ge=1, le=MAX_ID)]


class FitView(BaseModel):
    """The state that is checked: of a checkpoint, or found by a job; and the weight map."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_of: _Number | None = None
    shapes_job: _Number | None = None
    map: Annotated[str, Field(max_length=256)] | None = None
    inverse: bool = False
    below: Annotated[str, Field(max_length=1024)] | None = None
    done: Annotated[str, Field(max_length=32)] | None = None

    @property
    def through(self) -> MapChoice:
        """The weight map; forms send empty fields, too."""
        return MapChoice(self.map or None, self.inverse, self.below or None)


@feature.page(_PATH, "will_it_load.html")
def will_it_load_page(checkpoint_id: IdPath, view: Annotated[FitView, Query()], ask: Ask) -> Response:
    """The answer for the state in the address; without one the forms that choose it."""
    job, check = None, None
    if view.shapes_job is not None:
        job = ask.job(view.shapes_job)
        if job.kind != "shapes":
            raise NotFoundError(f"job {job.id} is not of the kind shapes")
    if view.state_of is not None or (job is not None and job.state == "succeeded"):
        try:
            check = check_load_of(checkpoint_id, ask, view.through, view.state_of, view.shapes_job)
        except UnprocessableError as problem:
            return _page(checkpoint_id, view, ask, job=job, fault=problem.detail)
    url = ask.request.url
    twin = f"/api/v1{url.path}?{url.query}" if check else f"/api/v1/checkpoints/{checkpoint_id}"
    return _page(checkpoint_id, view, ask, check, job=job, twin=twin)


@feature.form(_PATH, scope="read")
def will_it_load_form(checkpoint_id: IdPath, form: FormDep, ask: Ask) -> str | Response:
    """The answer for the pasted text; of a config.json a job makes the model, and the page follows it."""
    from dcp.server.features.will_it_load.states import (  # only here: they import numpy
        document_of_text,
        is_config,
    )

    text = form.text("text")
    view = _view_of(form)
    try:
        check_map(view.through)
        document = document_of_text(text)
        if is_config(document):
            job = ask.submit(ShapesKind, _params(checkpoint_id, document))
            chosen = view.model_dump(include={"map", "inverse", "below"}, exclude_defaults=True)
            return f"{ask.request.url.path}?{urlencode({'shapes_job': job.id, **chosen})}"
        check = check_document(checkpoint_id, document, ask, view.through)
    except UnprocessableError as problem:
        return _page(checkpoint_id, view, ask, text=text, fault=problem.detail)
    return _page(checkpoint_id, view, ask, check, text=text)


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
    checkpoint_id: int,
    view: FitView,
    ask: Ask,
    check: LoadCheck | None = None,
    fault: str | None = None,
    **others: Any,
) -> Response:
    newest = CheckpointFilter(states=frozenset({"committed"}))
    recent = ask.find(list_checkpoints, newest, limit=_OFFERED, visible=ask.visible).checkpoints
    findings = check and (check.renamed or check.plain)
    return page(
        ask.request,
        "will_it_load/will_it_load.html",
        200 if fault is None else UnprocessableError.status,
        **{"job": None, "text": "", "twin": f"/api/v1/checkpoints/{checkpoint_id}", **others},
        found=ask.find(get_checkpoint, checkpoint_id, ask.visible),
        view=view,
        maps=list(ready_maps()),
        check=check,
        findings=findings,
        state_name=None if view.state_of is None else _name(view.state_of, ask),
        listed=_by_kind(findings.problems) if findings else {},
        fault=fault,
        offered=[one for one in recent if one.id != checkpoint_id],
    )


def _name(checkpoint_id: int, ask: Ask) -> str:
    return ask.find(keys_of, [checkpoint_id], ask.visible).get(checkpoint_id, str(checkpoint_id))


def _by_kind(problems: tuple[LoadProblem, ...]) -> dict[str, list[LoadProblem]]:
    found: dict[str, list[LoadProblem]] = {}
    for one in problems:
        rows = found.setdefault(one.kind, [])
        if len(rows) < _ROWS:
            rows.append(one)
    return found
