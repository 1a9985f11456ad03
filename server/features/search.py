"""Search: runs, checkpoints, aliases, tags, and tensors by name, and results of other features."""

from __future__ import annotations

from typing import Annotated, Any, Final, get_args
from urllib.parse import urlencode

from fastapi import Query, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.catalog.inputs import LateChoice, Text
from dcp.server.catalog.search import HitKind, SearchHit, SearchResult
from dcp.server.catalog.search import search as find_names
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature, Finder
from dcp.server.core.pages.requests import query_of
from dcp.server.features import features
from dcp.server.features.checkpoints import LookupQuery, lookup_checkpoint

feature: Final = Feature("search", __name__)


def _kinds() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*get_args(HitKind), *_finders())))


_Kind = Annotated[str, LateChoice(_kinds)]


class SearchQuery(BaseModel):
    """The typed text, the kinds of hits, and how many hits of each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    q: Annotated[
        Text,
        Field(
            min_length=1,
            max_length=256,
            description="Part of a name or of a note, a step, or a path `run/name`.",
            examples=["q_proj"],
        ),
    ]
    kind: Annotated[list[_Kind], Field(max_length=8, description="Kinds of hits; default: all.")] = []
    limit: Annotated[int, Field(ge=1, le=50, description="Maximum hits of each kind.")] = 10


@feature.get("/search", tag="search", errors=())
def search(query: Annotated[SearchQuery, Query()], ask: Ask) -> SearchResult:
    """Search runs, checkpoints, aliases, tags, and tensors with `q` in their names, best first; then notes
    with `q` in their text.

    Case is ignored. A number also matches a step, and `run/name` a path.
    """
    with ask.reading() as connection:
        named = find_names(connection, query.q, ask.visible, kinds=query.kind, limit=query.limit).items
        finders = [find for kind, find in _finders().items() if not query.kind or kind in query.kind]
        others = [hit for find in finders for hit in find(connection, query.q, ask.visible, query.limit)]
    return SearchResult((*named, *others))


def _finders() -> dict[str, Finder]:
    return {kind: find for one in features() for kind, find in one.finders.items()}


@feature.page("/search", "search.html")
def search_page(ask: Ask, q: Annotated[str | None, Query(max_length=256)] = None) -> dict[str, Any]:
    """Show the hits, the best first."""
    typed = (q or "").strip()
    hits = search(query_of(SearchQuery, q=typed), ask).items if typed else ()
    return {
        "twin": f"/api/v1/search?{urlencode({'q': typed})}" if typed else None,
        "q": q or "",
        "hits": [(hit, _link(hit)) for hit in hits],
    }


@feature.page("/lookup", "")
def lookup_page(view: Annotated[LookupQuery, Query()], ask: Ask) -> Response:
    """Go to the page of the checkpoint of this name."""
    return RedirectResponse(f"/checkpoints/{lookup_checkpoint(view, ask).id}", 303)


def _link(hit: SearchHit) -> str:
    """Return the page of the hit; for a tag, the list of its checkpoints."""
    if hit.href is not None:
        return hit.href
    if hit.kind == "run":
        return f"/runs/{hit.run_id}"
    if hit.kind == "tag":
        return f"/checkpoints?{urlencode({'tag': hit.text})}"
    page = f"/checkpoints/{hit.checkpoint_id}"
    if hit.kind == "tensor":
        return f"{page}?{urlencode({'view': 'list', 'glob': hit.text[:200]})}#tensors"
    return page
