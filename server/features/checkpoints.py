"""Checkpoints: list with facets, lookup, registration, detail, and code snippets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast
from urllib.parse import urlencode

from fastapi import Header, Response
from fastapi import Query as InQuery
from pydantic import Field
from sqlalchemy import Connection

from dcp.server.catalog import details, listing
from dcp.server.catalog.filters import (
    CheckpointFilter,
    MetricCondition,
    RootName,
    Sort,
    SortText,
    check_filter,
    notes_of,
)
from dcp.server.catalog.inputs import Name, Paged, Query, Step, Text
from dcp.server.catalog.listing import CheckpointFacets, Facet, checkpoint_facets
from dcp.server.core.answers import IdPath, answer_model
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.logs import redact
from dcp.server.core.pages.formatting import metrics_of
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.scan.reading import Registration, observe, place_of
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail, Registered
from dcp.server.records.lists import NotedPage

feature: Final = Feature("checkpoints", __name__)


class CheckpointQuery(CheckpointFilter, Paged):
    """Page, filters, and order of a list of checkpoints."""

    sort: SortText = "-time"


@feature.get("/checkpoints", tag="checkpoints", errors=())
def list_checkpoints(query: Annotated[CheckpointQuery, InQuery()], ask: Ask) -> NotedPage[Checkpoint]:
    """List checkpoints, newest first. Deleted and unreadable checkpoints need a `state` filter.

    An unknown root, run, or metric is an error with similar names.
    """
    return find_page(query, query.sort, ask, query.cursor, query.limit)


def find_page(
    wanted: CheckpointFilter, sort: str, ask: Ask, cursor: str | None = None, limit: int = 50
) -> NotedPage[Checkpoint]:
    """Return a page of checkpoints visible to the caller. Raises InvalidQueryError."""
    order = Sort.parse(sort)
    with ask.reading() as connection:
        check_filter(connection, wanted, order, ask.visible)
        page = listing.list_checkpoints(connection, wanted, order, cursor, limit, ask.visible)
        notes = notes_of(connection, wanted.root, ask.visible)
    return NotedPage(page.items, page.next_cursor, tuple(redact(notes)))


class FacetQuery(CheckpointFilter):
    """The filters of a list of checkpoints, and how many values are counted of each."""

    values: Annotated[int, Field(ge=1, le=200, description="Values of each filter at most.")] = 20


@feature.get("/checkpoints/facets", tag="checkpoints", errors=())
def get_checkpoint_facets(query: Annotated[FacetQuery, InQuery()], ask: Ask) -> CheckpointFacets:
    """Count checkpoints by the values of each filter, with all other filters applied."""
    return _count(query, ask, query.values)


def _count(wanted: CheckpointFilter, ask: Ask, limit: int) -> CheckpointFacets:
    with ask.reading() as connection:
        check_filter(connection, wanted, Sort(), ask.visible)
        return checkpoint_facets(connection, wanted, ask.visible, limit=limit)


class LookupQuery(Query):
    """Checkpoint by ``key`` or ``uri``, or by ``run`` and ``step`` or ``alias``; a run alone means its latest
    step. ``root`` selects a root if several match."""

    root: Annotated[RootName | None, Field(description="Name of a root.")] = None
    key: Annotated[
        Annotated[Text, Field(min_length=1, max_length=1024)] | None,
        Field(description="Path of the checkpoint in its root."),
    ] = None
    run: Annotated[
        Annotated[Text, Field(max_length=1024)] | None,
        Field(description="Key of a run: its path in the root."),
    ] = None
    step: Annotated[Step | None, Field(description="Step in the run.")] = None
    alias: Annotated[Name | None, Field(description="Alias in the run, such as best.")] = None
    uri: Annotated[
        Annotated[Text, Field(min_length=1, max_length=4096)] | None,
        Field(description="Path or URL used by the trainer."),
    ] = None


@feature.get("/checkpoints/lookup", tag="checkpoints")
def lookup_checkpoint(query: Annotated[LookupQuery, InQuery()], ask: Ask) -> CheckpointDetail:
    """Find a checkpoint by name. If several match, committed checkpoints come first, then newer
    checkpoints."""
    given = query.model_dump(exclude={"uri"})
    if query.uri is not None:
        if any(value is not None for value in given.values()):
            raise UnprocessableError("uri excludes all other names of a checkpoint", field="uri")
        given["root"], given["key"] = place_of(ask.roots, query.uri, ask.visible)
    return ask.tagged(ask.find(details.find_checkpoint, details.CheckpointName(**given), ask.visible))


_REGISTERED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": answer_model(Registered), "description": "It was known."},
    201: {"model": answer_model(Registered), "description": "The checkpoint is new."},
}


@feature.post("/checkpoints", tag="checkpoints", scope="write", responses=_REGISTERED, errors=(404, 409, 410))
def register_checkpoint(body: Registration, ask: Ask) -> Registered:
    """Read a checkpoint now, before the next scan. Repetitions change nothing."""
    write = observe(
        ask.service.database,
        ask.roots,
        body,
        caller=ask.caller,
        allowances=ask.service.allowances,
        clock=ask.service.clock,
    )

    def act(connection: Connection) -> Registered:
        found = write(connection)
        ask.response.status_code = 201 if found.is_new else 200
        if found.id is not None:
            ask.response.headers["Location"] = f"{ask.request.url.path}/{found.id}"
        return found

    return ask.transact(act)


_NOT_MODIFIED: Final[dict[int | str, dict[str, Any]]] = {304: {"description": "The ETag matches."}}


@feature.get("/checkpoints/{checkpoint_id}", tag="checkpoints", responses=_NOT_MODIFIED)
def get_checkpoint(
    checkpoint_id: IdPath,
    ask: Ask,
    if_none_match: Annotated[
        str | None, Header(max_length=1024, description="ETags; 304 without a body if one matches.")
    ] = None,
) -> CheckpointDetail:
    """Return all facts about a checkpoint."""
    found = ask.find(details.get_checkpoint, checkpoint_id, ask.visible)
    headers = {"ETag": found.etag, "Cache-Control": "private, no-cache"}
    if if_none_match is not None and (if_none_match.strip() == "*" or found.etag in if_none_match):
        return cast(CheckpointDetail, Response(status_code=304, headers=headers))
    ask.response.headers.update(headers)
    return found


# -- the page, and lists on other pages ----------------------------------------------------------------------

_ROWS: Final = 50
_OF_ALL: Final = ("root", "run")


class ListView(CheckpointFilter):
    """Query of a list: filters, order, and the displayed ``metric``."""

    metric: Name | None = None  # type: ignore[assignment]  # of which there are no conditions
    sort: SortText = "-time"
    cursor: Annotated[str, Field(max_length=4096)] | None = None

    @property
    def is_filtered(self) -> bool:
        """True if the filters exclude checkpoints."""
        return not self.model_fields_set.isdisjoint(CheckpointFilter.model_fields.keys() - {"metric"})

    @property
    def metrics(self) -> tuple[MetricCondition, ...]:
        """None."""
        return ()


@feature.page("/checkpoints", "checkpoints.html")
def checkpoints_page(view: Annotated[ListView, InQuery()], ask: Ask) -> dict[str, Any]:
    """Show the checkpoints of all runs, the newest first."""
    found = listed(view, ask)
    names = {name for one in found["checkpoints"] for name in metrics_of(one)}
    given = ask.request.query_params.multi_items()
    query = [(name, value) for name, value in given if name not in ("metric", "sort", "cursor", "done")]
    return {
        "twin": f"/api/v1/checkpoints?{urlencode([*query, ('sort', view.sort)])}",
        "metric": view.metric or loss_of(names),
        **found,
    }


def listed(view: ListView, ask: Ask, run_id: int | None = None) -> dict[str, Any]:
    """Return the values of `checkpoint_list.html` for one run or all runs."""
    wanted = view if run_id is None else view.model_copy(update={"run_id": run_id})
    found = find_page(wanted, view.sort, ask, view.cursor, _ROWS)
    counts = _count(wanted, ask, 12)
    facets = [one for one in counts.facets if run_id is None or one.name not in _OF_ALL]
    return {
        "view": view,
        "run_id": run_id,
        "checkpoints": found.items,
        "next_cursor": found.next_cursor,
        "notes": found.notes,
        "count": counts.count,
        "facets": [(one, chosen) for one in facets if (chosen := _chosen(view, one)) or len(one.values) > 1],
        "is_filtered": view.is_filtered,
    }


def _chosen(view: ListView, facet: Facet) -> tuple[str, ...]:
    """Return the selected values of the filter."""
    value = getattr(view, facet.name)
    if isinstance(value, tuple):
        return value
    if isinstance(value, bool):
        return (str(value).lower(),)
    return () if value is None else (value,)


def loss_of(names: Iterable[str]) -> str | None:
    """Return the metric to show first: a loss, or the first name in order."""
    ordered = sorted(names)
    return next((name for name in ordered if "loss" in name.lower()), ordered[0] if ordered else None)


@dataclass(frozen=True, slots=True)
class Snippet:
    """Code snippet with a ``title``."""

    title: str
    code: str


def snippets_of(found: Any, root: Any, base_url: str) -> list[Snippet]:
    """Return snippets for a checkpoint of the API: by its URL in storage, if visible, and by the catalog."""
    code = _by_format(found.format, repr(_place(found, root)))
    client = (
        "from dcp.server.client import Client\n\n"
        f"with Client({base_url.rstrip('/')!r}) as client:\n"
        f'    client.download({found.id}, "checkpoint.safetensors", drop_objects=True)'
    )
    return [*([Snippet("From storage", code)] if code else []), Snippet("From this catalog", client)]


def _place(found: Any, root: Any) -> str:
    """Return the location in storage, or a placeholder if the location is hidden."""
    return (
        f"<URL of root {found.root}>/{found.key}"
        if root is None or root.url is None
        else f"{root.url.rstrip('/')}/{found.key}"
    )


def _by_format(name: str, place: str) -> str | None:
    match name:
        case "dcp" | "torch_dcp":
            state = 'state = {"model": model}  # as it was saved'
            return f"import dcp\n\n{state}\ndcp.load(state, checkpoint_id={place})"
        case "torch_save":
            return f"import torch\n\nstate = torch.load({place}, weights_only=True)"
        case "safetensors":
            return f"import dcp\n\nstate = dcp.read({place})"
        case _:
            return None
