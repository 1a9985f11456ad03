"""Counts beside a list's filters, and hits of a search."""

from __future__ import annotations

from dcp.server.records import search
from dcp.server.schemas.records import RecordAnswer, answers

__all__ = ["FacetAnswer", "FacetValueAnswer", "FacetsAnswer", "SearchAnswer", "SearchHitAnswer"]


@answers(search.FacetValue)
class FacetValueAnswer(RecordAnswer):
    """A value of a filter, and how many checkpoints it would leave."""


@answers(search.Facet)
class FacetAnswer(RecordAnswer):
    """The values of one filter, the most frequent first."""


@answers(search.CheckpointFacets)
class FacetsAnswer(RecordAnswer):
    """Counts beside a list: each filter's with all others applied."""


@answers(search.SearchHit)
class SearchHitAnswer(RecordAnswer):
    """Something whose name has what was searched for."""


@answers(search.SearchResult)
class SearchAnswer(RecordAnswer):
    """The best hits of each kind, the best of all first."""
