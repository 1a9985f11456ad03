"""Queries of lists: what may stand behind the question mark. What is not known is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from dcp.server.catalog.facts import State, Verification
from dcp.server.catalog.filters import CheckpointFilter, MetricCondition, Sort
from dcp.server.catalog.formats import FormatName
from dcp.server.catalog.runs import RunFilter, RunSort
from dcp.server.core.inputs import MAX_ID, Name, Text, Time
from dcp.server.records.search import HitKind

__all__ = [
    "CheckpointQuery",
    "FacetQuery",
    "LookupQuery",
    "Query",
    "RunQuery",
    "SearchQuery",
    "TensorBytesQuery",
    "TimelineQuery",
]

MAX_PAGE = 500

_Pattern = Annotated[Text, StringConstraints(min_length=1, max_length=256)]
_Step = Annotated[int, Field(ge=0, le=MAX_ID)]
_RootName = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")]


_NO_FILTERS: Final = frozenset({"limit", "cursor", "sort", "values"})
_FILTERS: Final = {
    "since": "since_seconds",
    "until": "until_seconds",
    "format": "formats",
    "state": "states",
    "verification": "verifications",
    "tag": "tags",
    "metric": "metrics",
    "pinned": "is_pinned",
}
"""Fields of the filter that are asked for by another name, most because queries repeat names."""


class Query(BaseModel):
    """The base of all."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Paged(Query):
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE, description="Rows of a page at most.")] = 50
    cursor: (
        Annotated[
            str,
            Field(min_length=1, max_length=4096, description="The next_cursor of the page before."),
        ]
        | None
    ) = None


class _Filters(Query):
    """All that is given holds; where something is given several times, one of them, but all of the tags."""

    root: _RootName | None = None
    run_id: Annotated[int, Field(ge=1, le=MAX_ID)] | None = None
    run: Annotated[Text, Field(max_length=1024, description="The key of a run.")] | None = None
    run_contains: _Pattern | None = None
    run_glob: _Pattern | None = None
    min_step: _Step | None = None
    max_step: _Step | None = None
    since: Annotated[Time | None, Field(description="Committed from this time on.")] = None
    until: Annotated[Time | None, Field(description="Committed before this time.")] = None
    format: Annotated[list[FormatName], Field(max_length=8)] = []
    state: Annotated[
        list[State | Literal["any"]], Field(max_length=8, description="Committed ones, if not given.")
    ] = []
    verification: Annotated[list[Verification], Field(max_length=8)] = []
    tag: Annotated[list[Name], Field(max_length=8)] = []
    alias: Name | None = None
    metric: Annotated[
        list[_Pattern],
        Field(max_length=8, description="Comparisons such as loss<2.5.", examples=[["loss<2.5"]]),
    ] = []
    dtype: Annotated[str, StringConstraints(max_length=32, pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    tensor: Annotated[_Pattern, Field(description="Has a tensor of this name or glob.")] | None = None
    name_contains: _Pattern | None = None
    name_glob: _Pattern | None = None
    pinned: bool | None = None

    @property
    def wanted(self) -> CheckpointFilter:
        """For the catalog. Raises InvalidQueryError."""
        given: dict[str, Any] = {
            _FILTERS.get(name, name): frozenset(value) if isinstance(value, list) else value
            for name in type(self).model_fields.keys() - _NO_FILTERS
            for value in [getattr(self, name)]
        }
        given["states"] = frozenset() if "any" in self.state else frozenset(self.state or ["committed"])
        given["metrics"] = tuple(MetricCondition.parse(text) for text in self.metric)
        return CheckpointFilter(**given)


class CheckpointQuery(_Filters, _Paged):
    """All that is given holds; where something is given several times, one of them, but all of the tags."""

    sort: Annotated[
        str,
        Field(
            max_length=140,
            pattern=r"^-?(time|step|bytes|name|metric:[A-Za-z0-9_][A-Za-z0-9_./:@+=-]*)$",
            description="time, step, bytes, name or metric:NAME, the greatest first with a minus.",
        ),
    ] = "-time"

    @property
    def order(self) -> Sort:
        """For the catalog. Raises InvalidQueryError."""
        return Sort.parse(self.sort)


class FacetQuery(_Filters):
    """The filters of a list of checkpoints, and how many values are counted of each."""

    values: Annotated[int, Field(ge=1, le=200, description="Values of each filter at most.")] = 20


class LookupQuery(Query):
    """A checkpoint by its ``key`` or ``uri``, or by a ``run`` and a ``step`` or ``alias``; of a run alone it
    is the latest step. ``root`` where several have the same."""

    root: _RootName | None = None
    key: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    run: Annotated[Text, Field(max_length=1024, description="The key of a run.")] | None = None
    step: _Step | None = None
    alias: Name | None = None
    uri: (
        Annotated[
            Text,
            Field(min_length=1, max_length=4096, description="The path or URL that a trainer saved under."),
        ]
        | None
    ) = None


class SearchQuery(Query):
    """What is typed, of which kinds, and how many hits of each."""

    q: Annotated[_Pattern, Field(examples=["q_proj"])]
    kind: Annotated[list[HitKind], Field(max_length=8, description="All, if not given.")] = []
    limit: Annotated[int, Field(ge=1, le=50, description="Hits of each kind at most.")] = 10


class TimelineQuery(Query):
    """Which steps of a run, in how many bins, with which metrics."""

    metric: Annotated[list[Name], Field(max_length=8, description="Also these.")] = []
    points: Annotated[int, Field(ge=1, le=1000, description="As many bins at most.")] = 300
    min_step: _Step | None = None
    max_step: _Step | None = None


class TensorBytesQuery(Query):
    """Which tensors, in checkpoints of which steps."""

    only: Annotated[
        list[_Pattern],
        Field(max_length=16, description="Globs on names; those of optimizers, if not given."),
    ] = []
    below_step: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None


class RunQuery(_Paged):
    """Runs of a root, whose key has a part, or matches a glob."""

    root: _RootName | None = None
    contains: _Pattern | None = None
    glob: _Pattern | None = None
    sort: RunSort = "-latest"

    @property
    def wanted(self) -> RunFilter:
        """For the catalog. Raises InvalidQueryError."""
        return RunFilter(root=self.root, contains=self.contains, glob=self.glob)
