"""Load checks in the API: whether a checkpoint fills a state, by names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import Depends, Query
from pydantic import Field, StringConstraints

from dcp.server.catalog.errors import StateError
from dcp.server.catalog.values import clean_text
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.data.access import Readable
from dcp.server.core.inputs import MAX_ID, Request
from dcp.server.core.jobs.ledger import get_job
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.convert.options import MapChoice
from dcp.server.features.will_it_load import feature
from dcp.server.records.contents import LoadCheck, LoadFindings
from dcp.storage.errors import OptionError, PlanError

if TYPE_CHECKING:
    from dcp.server.features.will_it_load.states import StateNames
    from dcp.storage.formats.index import CheckpointIndex

__all__ = ["check_document", "check_load_of", "check_map"]

_PATH: Final = "/checkpoints/{checkpoint_id}/will-it-load"
_ERRORS: Final = (400, 401, 403, 404, 409, 410, 413, 421, 422, 429, 503)
_MOST: Final = 100_000

_Number = Annotated[int | None, Query(ge=1, le=MAX_ID)]
_Fqn = Annotated[str, StringConstraints(max_length=4096)]


class StateTensorRequest(Request):
    """A tensor of a state; a shape or dtype that is null is not compared."""

    fqn: _Fqn
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 53)]], Field(max_length=64)] | None = None
    dtype: Annotated[str, Field(max_length=32, examples=["bfloat16"])] | None = None


class StateRequest(Request):
    """The state that is to be filled. Without `objects` nothing is said of values that are no tensors."""

    tensors: Annotated[list[StateTensorRequest], Field(max_length=_MOST)]
    objects: Annotated[list[_Fqn], Field(max_length=_MOST)] | None = None


def _map_choice(
    map: Annotated[
        str | None, Query(max_length=256, description="A ready weight map to load through.")
    ] = None,
    inverse: Annotated[bool, Query(description="Reverse the mapping.")] = False,
    below: Annotated[
        str | None, Query(max_length=1024, description="The prefix here of the names in the map's source.")
    ] = None,
) -> MapChoice:
    return MapChoice(map, inverse, below)


_Map = Annotated[MapChoice, Depends(_map_choice)]


def check_map(through: MapChoice) -> None:
    """Raise UnprocessableError for a map that does not exist."""
    try:
        through.check()
    except ValueError as error:
        raise UnprocessableError(str(error), field="map") from None


@feature.get(_PATH, tag="data", errors=_ERRORS)
def check_load_of(
    checkpoint_id: IdPath,
    ask: Ask,
    through: _Map,
    state_of: Annotated[_Number, Query(description="Of another checkpoint.")] = None,
    shapes_job: Annotated[_Number, Query(description="That a job of the kind shapes has found.")] = None,
) -> LoadCheck:
    """Whether it fills the state of another checkpoint, or of a config.json that a job has looked at."""
    check_map(through)
    if (state_of is None) == (shapes_job is None):
        raise UnprocessableError("which state? give state_of or shapes_job", field="state_of")
    if shapes_job is not None:
        document, config = _shapes(shapes_job, ask)
        return check_document(checkpoint_id, document, ask, through, config)
    from dcp.server.features.will_it_load.states import (
        state_of_index,  # only here, as all that reads checkpoints
    )

    found = ask.data.open(checkpoint_id)
    other = ask.data.open(state_of or 0)
    with other.problems():
        state = state_of_index(other.opened.whole_index)
    return _checked(found, state, ask, through, {})


def _shapes(job_id: int, ask: Ask) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The state that a job has found, and the config.json of its model."""
    job = ask.find(get_job, job_id, ask.visible)
    if job.kind != "shapes" or job.state != "succeeded":
        raise StateError(
            f"job {job_id} ({job.kind}) is {job.state}; a job of the kind shapes that has succeeded "
            "tells of a state",
            state=job.state,
        )
    return job.result or {}, job.params.get("config") or {}


@feature.post(_PATH, tag="data", scope="read", errors=_ERRORS)
def check_load_of_state(checkpoint_id: IdPath, state: StateRequest, ask: Ask, through: _Map) -> LoadCheck:
    """Whether it fills a state with these names, shapes and dtypes. Nothing is changed, nothing is kept."""
    document: dict[str, Any] = {"tensors": [one.model_dump() for one in state.tensors]}
    if state.objects is not None:
        document["objects"] = state.objects
    return check_document(checkpoint_id, document, ask, through)


def check_document(
    checkpoint_id: int,
    document: Mapping[str, Any],
    ask: Ask,
    through: MapChoice,
    config: Mapping[str, Any] | None = None,
) -> LoadCheck:
    """Check a state that is given as JSON in any of the accepted forms; ``config``: its model's, if known."""
    check_map(through)
    from dcp.server.features.will_it_load.states import state_of_document

    state = state_of_document(document)
    return _checked(ask.data.open(checkpoint_id), state, ask, through, config or {})


def _checked(
    found: Readable, state: StateNames, ask: Ask, through: MapChoice, config: Mapping[str, Any]
) -> LoadCheck:
    from dcp.server.features.will_it_load.checks import check_load

    with found.problems():
        index = _mapped(found, through, config)
        check = check_load(found.row.id, index, state, ask.place_of(found.row), _map_code(through))
    return replace(
        check,
        plain=_clean(check.plain),
        renamed=check.renamed and _clean(check.renamed),
        rename={clean_text(regex): clean_text(text) for regex, text in check.rename.items()},
        hint=check.hint and clean_text(check.hint),
        code=clean_text(check.code),
    )


def _mapped(found: Readable, through: MapChoice, config: Mapping[str, Any]) -> CheckpointIndex:
    """The index of the checkpoint behind the map, which may need the model's ``config.json``: that beside the
    checkpoint, or ``config``. Raises UnprocessableError where the map does not fit."""
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
    """The map as an argument of `dcp.load`."""
    if through.given is None:
        return None
    more = ", inverse=True" if through.inverse else ""
    more += f", below={through.below!r}" if through.below else ""
    return f"map=dcp.weight_map({through.given!r}{more})" if more else f"map={through.given!r}"


def _clean(found: LoadFindings) -> LoadFindings:
    problems = [
        replace(one, fqn=clean_text(one.fqn), stored_fqn=one.stored_fqn and clean_text(one.stored_fqn))
        for one in found.problems
    ]
    return replace(found, problems=tuple(problems))
