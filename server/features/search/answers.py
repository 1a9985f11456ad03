"""Hits of a search."""

from __future__ import annotations

from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records import search

__all__ = ["SearchAnswer", "SearchHitAnswer"]


@answers(search.SearchHit)
class SearchHitAnswer(RecordAnswer):
    """Something whose name has what was searched for."""


@answers(search.SearchResult)
class SearchAnswer(RecordAnswer):
    """The best hits of each kind, the best of all first."""
