"""Load checks of a checkpoint against a state by names, shapes, and dtypes: the API and the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Response
from pydantic import Field, StringConstraints

from dcp.planners.weight_maps.weight_map import ready_maps
from dcp.server.catalog.details import get_checkpoint, keys_of
from dcp.server.catalog.errors import StateError
from dcp.server.catalog.filters import CheckpointFilter
from dcp.server.catalog.inputs import Id, Request
from dcp.server.catalog.inputs import Query as QueryModel
from dcp.server.catalog.listing import list_checkpoints
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.data.access import Readable
from dcp.server.core.jobs.ledger.reading import get_job
from dcp.server.core.pages.requests import FormDep, checked
from dcp.server.core.problems import NotFoundError, UnprocessableError
from dcp.server.features.convert.options import MapChoice
from dcp.server.features.will_it_load import (
    LoadCheck,
    LoadProblem,
    ShapesKind,
    ShapesParams,
    feature,
)
from dcp.storage.errors import OptionError, PlanError

if TYPE_CHECKING:
    from dcp.server.features.will_it_load.checks import StateNames
    from dcp.storage.formats.index import CheckpointIndex


_PATH: Final = "/checkpoints/{checkpoint_id}/will-it-load"
_ERRORS: Final = (400, 401, 403, 404, 409, 410, 413, 421, 422, 429, 503)
_MOST: Final = 100_000
_OFFERED: Final = 30
_ROWS: Final = 100

_Fqn = Annotated[str, StringConstraints(max_length=4096)]


class StateTensorRequest(Request):
    """Tensor of a state; a null shape or dtype is not compared."""

    fqn: _Fqn = Field(description="Name in the state.")
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 53)]], Field(max_length=64)] | None = Field(
        default=None, description="Expected shape; null: not compared."
    )
    dtype: Annotated[str, Field(max_length=32, examples=["bfloat16"])] | None = Field(
        default=None, description="Expected dtype; null: not compared."
    )


class StateRequest(Request):
    """State to fill. Without `objects`, values other than tensors are not checked."""

    tensors: Annotated[list[StateTensorRequest], Field(max_length=_MOST)] = Field(
        description="Tensors of the state."
    )
    objects: Annotated[list[_Fqn], Field(max_length=_MOST)] | None = Field(
        default=None, description="Names of other values; null: not checked."
    )


class MapQuery(QueryModel):
    """The weight map through which the checkpoint is loaded."""

    map: Annotated[str | None, Field(max_length=256, description="A ready weight map to load through.")] = (
        None
    )
    inverse: Annotated[bool, Field(description="Reverse the mapping.")] = False
    below: Annotated[
        str | None, Field(max_length=1024, description="The prefix here of the names in the map's source.")
    ] = None

    def choice(self) -> MapChoice:
        """Return the map; forms also send empty fields. Raises UnprocessableError for an unknown map."""
        choice = MapChoice(self.map or None, self.inverse, self.below or None)
        try:
            choice.check()
        except ValueError as error:
            raise UnprocessableError(str(error), field="map") from None
        return choice


class _State(QueryModel):
    state_of: Annotated[Id | None, Field(description="Of another checkpoint.")] = None
    shapes_job: Annotated[Id | None, Field(description="Found by a job of the kind shapes.")] = None


class StateQuery(MapQuery, _State):
    """State, from a checkpoint or a job, and the weight map."""


@feature.get(_PATH, tag="data", errors=_ERRORS)
def check_load_of(checkpoint_id: IdPath, query: Annotated[StateQuery, Query()], ask: Ask) -> LoadCheck:
    """Check the checkpoint against the state of another checkpoint, or of a config.json from a job."""
    through = query.choice()
    if (query.state_of is None) == (query.shapes_job is None):
        raise UnprocessableError("pass state_of or shapes_job", field="state_of")
    if query.shapes_job is not None:
        document, config = _shapes(query.shapes_job, ask)
        return _check_document(checkpoint_id, document, ask, through, config)
    from dcp.server.features.will_it_load.checks import (
        state_of_index,  # imports numpy
    )

    found = ask.data.open(checkpoint_id)
    other = ask.data.open(query.state_of or 0)
    with other.problems():
        state = state_of_index(other.opened.whole_index)
    return _checked(found, state, ask, through, {})


def _shapes(job_id: int, ask: Ask) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the state found by a job, and the config.json of its model."""
    job = ask.find(get_job, job_id, ask.visible)
    if job.kind != "shapes" or job.state != "succeeded":
        raise StateError(
            f"job {job_id} ({job.kind}) is {job.state}; pass a succeeded job of the kind shapes",
            state=job.state,
        )
    return job.result or {}, job.params.get("config") or {}


@feature.post(_PATH, tag="data", scope="read", errors=_ERRORS)
def check_load_of_state(
    checkpoint_id: IdPath, state: StateRequest, ask: Ask, query: Annotated[MapQuery, Query()]
) -> LoadCheck:
    """Check the checkpoint against a state of names, shapes, and dtypes. Changes and stores nothing."""
    document: dict[str, Any] = {"tensors": [one.model_dump() for one in state.tensors]}
    if state.objects is not None:
        document["objects"] = state.objects
    return _check_document(checkpoint_id, document, ask, query.choice())


def _check_document(
    checkpoint_id: int,
    document: Mapping[str, Any],
    ask: Ask,
    through: MapChoice,
    config: Mapping[str, Any] | None = None,
) -> LoadCheck:
    """Check a state in any accepted JSON form; ``config``: the model's, if known."""
    from dcp.server.features.will_it_load.checks import state_of_document

    state = state_of_document(document)
    return _checked(ask.data.open(checkpoint_id), state, ask, through, config or {})


def _checked(
    found: Readable, state: StateNames, ask: Ask, through: MapChoice, config: Mapping[str, Any]
) -> LoadCheck:
    from dcp.server.features.will_it_load.checks import check_load

    with found.problems():
        index = _mapped(found, through, config)
        return check_load(found.row.id, index, state, ask.place_of(found.row), _map_code(through))


def _mapped(found: Readable, through: MapChoice, config: Mapping[str, Any]) -> CheckpointIndex:
    """Return the index of the checkpoint behind the map. The map can need the model's ``config.json``: stored
    beside the checkpoint, or ``config``. Raises UnprocessableError for a map that does not fit."""
    from dcp.planners.weight_maps.axes import model_config
    from dcp.planners.weight_maps.mapped_index import map_all

    index, weights = found.opened.whole_index, through.weights()
    if weights is None:
        return index
    try:
        return map_all(index, weights.beside(model_config(found.opened.store)).beside(config)).index
    except (PlanError, OptionError) as error:
        raise UnprocessableError(found.root.hide(f"map: {error}"), field="map") from None


def _map_code(through: MapChoice) -> str | None:
    """Return the map as an argument of `dcp.load`."""
    if through.given is None:
        return None
    more = ", inverse=True" if through.inverse else ""
    more += f", below={through.below!r}" if through.below else ""
    return f"map=dcp.weight_map({through.given!r}{more})" if more else f"map={through.given!r}"


# -- the page ------------------------------------------------------------------------------------------------


class FitView(StateQuery):
    """State and map selected on the page."""

    done: Annotated[str, Field(max_length=32)] | None = None


@feature.page(_PATH, "will_it_load.html")
def will_it_load_page(checkpoint_id: IdPath, view: Annotated[FitView, Query()], ask: Ask) -> Response:
    """Show the result for the state in the address; without a state, the forms to select one."""
    job, check = None, None
    if view.shapes_job is not None:
        job = ask.job(view.shapes_job)
        if job.kind != "shapes":
            raise NotFoundError(f"job {job.id} is not of the kind shapes")
    if view.state_of is not None or (job is not None and job.state == "succeeded"):
        try:
            check = check_load_of(checkpoint_id, view, ask)
        except UnprocessableError as problem:
            return _page(checkpoint_id, view, ask, job=job, fault=problem.detail)
    url = ask.request.url
    twin = f"/api/v1{url.path}?{url.query}" if check else f"/api/v1/checkpoints/{checkpoint_id}"
    return _page(checkpoint_id, view, ask, check, job=job, twin=twin)


@feature.form(_PATH, scope="read")
def will_it_load_form(checkpoint_id: IdPath, form: FormDep, ask: Ask) -> str | Response:
    """Show the result for the pasted text; for a config.json, a job builds the model and the page follows the
    job."""
    from dcp.server.features.will_it_load.checks import (  # imported late: these modules import numpy
        document_of_text,
        is_config,
    )

    text = form.text("text")
    view = checked(
        FitView, map=form.optional("map"), inverse=form.is_checked("inverse"), below=form.optional("below")
    )
    try:
        through = view.choice()
        document = document_of_text(text)
        if is_config(document):
            job = ask.submit(ShapesKind, checked(ShapesParams, checkpoint_id=checkpoint_id, config=document))
            chosen = view.model_dump(include={"map", "inverse", "below"}, exclude_defaults=True)
            return f"{ask.request.url.path}?{urlencode({'shapes_job': job.id, **chosen})}"
        check = _check_document(checkpoint_id, document, ask, through)
    except UnprocessableError as problem:
        return _page(checkpoint_id, view, ask, text=text, fault=problem.detail)
    return _page(checkpoint_id, view, ask, check, text=text)


def _page(
    checkpoint_id: int,
    view: FitView,
    ask: Ask,
    check: LoadCheck | None = None,
    fault: str | None = None,
    **others: Any,
) -> Response:
    newest = CheckpointFilter()
    recent = ask.find(list_checkpoints, newest, limit=_OFFERED, visible=ask.visible).items
    keys = {} if view.state_of is None else ask.find(keys_of, [view.state_of], ask.visible)
    findings = check and (check.renamed or check.plain)
    return ask.page(
        "will_it_load/will_it_load.html",
        200 if fault is None else UnprocessableError.status,
        **{"job": None, "text": "", "twin": f"/api/v1/checkpoints/{checkpoint_id}", **others},
        found=ask.find(get_checkpoint, checkpoint_id, ask.visible),
        view=view,
        maps=list(ready_maps()),
        check=check,
        findings=findings,
        state_name=keys.get(view.state_of or 0),
        listed=_by_kind(findings.problems) if findings else {},
        fault=fault,
        offered=[one for one in recent if one.id != checkpoint_id],
    )


def _by_kind(problems: tuple[LoadProblem, ...]) -> dict[str, list[LoadProblem]]:
    found = defaultdict(list)
    for one in problems:
        found[one.kind].append(one)
    return {kind: rows[:_ROWS] for kind, rows in found.items()}
