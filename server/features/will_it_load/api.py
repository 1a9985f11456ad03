"""``/checkpoints/{id}/will-it-load``: whether a checkpoint fills a state, by names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, Query

from dcp.server.catalog.errors import StateError
from dcp.server.catalog.values import clean_text
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.data.access import DataAccess, DataDep, Readable
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import Caller, Db, ServiceDep, requires
from dcp.server.core.http.routers import api_router
from dcp.server.core.inputs import MAX_ID
from dcp.server.core.jobs.ledger import reading
from dcp.server.core.problems import UnprocessableError
from dcp.server.core.security.principal import Principal
from dcp.server.core.security.redaction import redact
from dcp.server.features.tensors.answers import LoadCheckAnswer
from dcp.server.features.will_it_load.answers import StateRequest
from dcp.server.features.will_it_load.maps import MapChoice
from dcp.server.records.contents import LoadFindings

__all__ = ["check_document", "router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])

_PROBLEMS = problems(400, 401, 403, 404, 409, 410, 413, 421, 422, 429, 503)
_Number = Annotated[int | None, Query(ge=1, le=MAX_ID)]
_MapName = Annotated[str | None, Query(max_length=256, description="A ready weight map to load through.")]
_Below = Annotated[str | None, Query(max_length=1024, description="What the map's source is below here.")]


def _map_choice(
    map: _MapName = None,
    inverse: Annotated[bool, Query(description="The map's other way.")] = False,
    below: _Below = None,
) -> MapChoice:
    return MapChoice(map, inverse, below)


MapDep = Annotated[MapChoice, Depends(_map_choice)]


@router.get("/will-it-load", responses=_PROBLEMS)
def check_load_of(
    checkpoint_id: IdPath,
    data: DataDep,
    database: Db,
    service: ServiceDep,
    caller: Caller,
    through: MapDep,
    state_of: Annotated[_Number, Query(description="Of another checkpoint.")] = None,
    shapes_job: Annotated[_Number, Query(description="That a job of the kind shapes has found.")] = None,
) -> LoadCheckAnswer:
    """Whether it fills the state of another checkpoint, or of a config.json that a job has looked at."""
    through.check()
    if (state_of is None) == (shapes_job is None):
        raise UnprocessableError("which state? give state_of or shapes_job", field="state_of")
    if shapes_job is not None:
        with database.read() as connection:
            job = reading.get_job(connection, shapes_job, caller.roots)
        if job.kind != "shapes" or job.state != "succeeded":
            raise StateError(
                f"job {shapes_job} ({job.kind}) is {job.state}; a job of the kind shapes that has succeeded "
                "tells of a state",
                state=job.state,
            )
        config = job.params.get("config")
        return check_document(
            checkpoint_id, job.result or {}, data, service, caller, through, config if config else {}
        )
    from dcp.server.features.will_it_load.states import (
        state_of_index,  # only here, as all that reads checkpoints
    )

    found = data.open(checkpoint_id, caller)
    other = data.open(state_of or 0, caller)
    with other.problems():
        state = state_of_index(other.opened.whole_index)
    return _checked(found, state, service, caller, through, {})


@router.post("/will-it-load", responses=_PROBLEMS)
def check_load_of_state(
    checkpoint_id: IdPath,
    state: StateRequest,
    data: DataDep,
    service: ServiceDep,
    caller: Caller,
    through: MapDep,
) -> LoadCheckAnswer:
    """Whether it fills a state with these names, shapes and dtypes. Nothing is changed, nothing is kept."""
    document: dict[str, Any] = {"tensors": [one.model_dump() for one in state.tensors]}
    if state.objects is not None:
        document["objects"] = state.objects
    return check_document(checkpoint_id, document, data, service, caller, through)


def check_document(
    checkpoint_id: int,
    document: Mapping[str, Any],
    data: DataAccess,
    service: Service,
    caller: Principal,
    through: MapChoice,
    config: Mapping[str, Any] | None = None,
) -> LoadCheckAnswer:
    """Of a state as JSON, in any of the ways in which it may be told; ``config``: its model's, if known."""
    through.check()
    from dcp.server.features.will_it_load.states import state_of_document

    state = state_of_document(document)
    return _checked(data.open(checkpoint_id, caller), state, service, caller, through, config or {})


def _checked(
    found: Readable,
    state: Any,
    service: Service,
    caller: Principal,
    through: MapChoice,
    config: Mapping[str, Any],
) -> LoadCheckAnswer:
    from dcp.server.features.will_it_load.checks import check_load

    place = _place(found, service, caller)
    with found.problems():
        index = through.apply(found.opened.whole_index, found.opened.store, found.root, config)
        check = check_load(found.row.id, index, state, place, through.code)
    return LoadCheckAnswer.of(
        replace(
            check,
            plain=_clean(check.plain),
            renamed=check.renamed and _clean(check.renamed),
            rename={clean_text(regex): clean_text(text) for regex, text in check.rename.items()},
            hint=check.hint and clean_text(check.hint),
            code=clean_text(check.code),
        )
    )


def _clean(found: LoadFindings) -> LoadFindings:
    problems = [
        replace(one, fqn=clean_text(one.fqn), stored_fqn=one.stored_fqn and clean_text(one.stored_fqn))
        for one in found.problems
    ]
    return replace(found, problems=tuple(problems))


def _place(found: Readable, service: Service, caller: Principal) -> str:
    """Where it is, as far as who asks may know that."""
    root = found.row.root
    url = redact(service.settings.roots[root].url) if caller.may("admin") else f"WHERE {root} IS"
    return f"{url.rstrip('/')}/{found.row.key}"
