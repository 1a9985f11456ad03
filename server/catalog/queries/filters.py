"""Filters and orders of lists of checkpoints."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import Field

from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.formats import FormatName
from dcp.server.catalog.inputs import MAX_ID, Name, Query, Text, Time
from dcp.server.catalog.name_patterns import check_pattern
from dcp.server.catalog.values import check_label
from dcp.server.records.checkpoints import State, Verification

__all__ = ["CheckpointFilter", "MetricCondition", "RootName", "Sort", "SortText"]

Comparison = Literal["<", "<=", "=", "!=", ">=", ">"]
SortBy = Literal["time", "step", "bytes", "name", "metric"]

_CONDITION: Final = re.compile(r"([A-Za-z0-9_./:@+-]+?)\s*(<=|>=|!=|==|=|<|>)\s*(\S+)")


@dataclass(frozen=True, slots=True)
class MetricCondition:
    """A comparison with a metric of the checkpoint."""

    name: str
    comparison: Comparison
    value: float

    def __post_init__(self) -> None:
        check_label("metric", self.name)
        if self.comparison not in get_args(Comparison) or not math.isfinite(self.value):
            raise InvalidQueryError("metric", "a comparison with a finite number is needed, as in loss<2.5")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a text such as "loss<2.5"; `InvalidQueryError` for anything else."""
        found = _CONDITION.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError
            comparison = "=" if found[2] == "==" else found[2]
            return cls(found[1], comparison, float(found[3]))  # type: ignore[arg-type]  # __post_init__ checks
        except ValueError:
            raise InvalidQueryError("metric", "name, comparison and number are needed: loss<2.5") from None


_Pattern = Annotated[Text, Field(min_length=1, max_length=256)]
_Step = Annotated[int, Field(ge=0, le=MAX_ID)]
SortText = Annotated[
    str,
    Field(
        max_length=140,
        pattern=r"^-?(time|step|bytes|name|metric:[A-Za-z0-9_][A-Za-z0-9_./:@+=-]*)$",
        description="time, step, bytes, name or metric:NAME, the greatest first with a minus.",
    ),
]
RootName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class CheckpointFilter(Query):
    """Filters of lists of checkpoints, in queries of the API and in addresses of pages.

    A checkpoint has to meet all that are given; where several values are given, one of them, but all of the
    tags. Those that compare a column stand at its field in `dcp.server.records.checkpoints`.
    """

    root: RootName | None = None
    run_id: Annotated[int, Field(ge=1, le=MAX_ID)] | None = None
    run: Annotated[Text, Field(max_length=1024, description="The key of a run.")] | None = None
    run_contains: _Pattern | None = None
    run_glob: _Pattern | None = None
    min_step: _Step | None = None
    max_step: _Step | None = None
    since: Annotated[Time | None, Field(description="Committed from this time on.")] = None
    until: Annotated[Time | None, Field(description="Committed before this time.")] = None
    format: Annotated[tuple[FormatName, ...], Field(max_length=8)] = ()
    state: Annotated[
        tuple[State | Literal["any"], ...], Field(max_length=8, description="Committed ones, if not given.")
    ] = ()
    verification: Annotated[tuple[Verification, ...], Field(max_length=8)] = ()
    tag: Annotated[tuple[Name, ...], Field(max_length=8)] = ()
    alias: Name | None = None
    metric: Annotated[
        tuple[_Pattern, ...],
        Field(max_length=8, description="Comparisons such as loss<2.5.", examples=[["loss<2.5"]]),
    ] = ()
    dtype: Annotated[str, Field(max_length=32, pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    tensor: Annotated[_Pattern, Field(description="Has a tensor of this name or glob.")] | None = None
    name_contains: _Pattern | None = None
    name_glob: _Pattern | None = None
    pinned: bool | None = None

    def model_post_init(self, context: Any) -> None:
        """Check patterns and comparisons. Raises InvalidQueryError."""
        _ = self.metrics
        for field in ("run_contains", "run_glob", "tensor", "name_contains", "name_glob"):
            if (pattern := getattr(self, field)) is not None:
                check_pattern(field, pattern)

    @property
    def states(self) -> tuple[str, ...]:
        """The states of checkpoints that are listed; empty for all."""
        return () if "any" in self.state else self.state or ("committed",)

    @property
    def metrics(self) -> tuple[MetricCondition, ...]:
        """The comparisons with metrics."""
        return tuple(MetricCondition.parse(text) for text in self.metric)

    def mark(self) -> tuple[object, ...]:
        """The same for equal filters only, in all processes."""
        values = (getattr(self, name) for name in CheckpointFilter.model_fields)
        return tuple(sorted(value) if isinstance(value, tuple) else value for value in values)


@dataclass(frozen=True, slots=True)
class Sort:
    """An order; among equals the same way by id.

    By step, checkpoints without one come as if before step 0. By a metric, those without it are left out.
    """

    by: SortBy = "time"
    descending: bool = True
    metric: str | None = None

    def __post_init__(self) -> None:
        if self.by not in get_args(SortBy) or (self.by == "metric") != (self.metric is not None):
            raise InvalidQueryError("sort", "time, step, bytes, name or metric:NAME, with - for descending")
        if self.metric is not None:
            check_label("sort", self.metric)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a text such as "-time", "step" or "metric:loss"; `InvalidQueryError` for anything else."""
        by, colon, metric = text.removeprefix("-").partition(":")
        return cls(by, text.startswith("-"), metric if colon else None)  # type: ignore[arg-type]
