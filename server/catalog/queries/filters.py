"""What a list of checkpoints may be asked for: filters and orders, as values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.formats import catalog_formats
from dcp.server.catalog.name_patterns import check_pattern
from dcp.server.catalog.values import check_label
from dcp.server.records.checkpoints import State, Verification

__all__ = ["CheckpointFilter", "MetricCondition", "Sort"]

Comparison = Literal["<", "<=", "=", "!=", ">=", ">"]
SortBy = Literal["time", "step", "bytes", "name", "metric"]

_CONDITION: Final = re.compile(r"([A-Za-z0-9_./:@+-]+?)\s*(<=|>=|!=|==|=|<|>)\s*(\S+)")
_MAX_CONDITIONS: Final = 8
_MAX_STEP: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class MetricCondition:
    """The checkpoint has the metric, and its value compares so."""

    name: str
    comparison: Comparison
    value: float

    def __post_init__(self) -> None:
        check_label("metric", self.name)
        if self.comparison not in get_args(Comparison) or not math.isfinite(self.value):
            raise InvalidQueryError("metric", "a comparison with a finite number is needed, as in loss<2.5")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Such as "loss<2.5"; `InvalidQueryError` for anything else."""
        found = _CONDITION.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError
            comparison = "=" if found[2] == "==" else found[2]
            return cls(found[1], comparison, float(found[3]))  # type: ignore[arg-type]  # __post_init__ checks
        except ValueError:
            raise InvalidQueryError("metric", "name, comparison and number are needed: loss<2.5") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFilter:
    """All that is given holds; of the sets, one of what is in them. Patterns: as `patterns` says.

    Steps are inclusive; times from ``since`` to before ``until``. ``run`` is the key of a run. ``tags``: it
    has all of them. ``tensor`` is a name or a glob: it has such a tensor. No ``states`` is all states.
    """

    root: str | None = None
    run_id: int | None = None
    run: str | None = None
    run_contains: str | None = None
    run_glob: str | None = None
    min_step: int | None = None
    max_step: int | None = None
    since_seconds: float | None = None
    until_seconds: float | None = None
    formats: frozenset[str] = frozenset()
    states: frozenset[State] = frozenset({"committed"})
    verifications: frozenset[Verification] = frozenset()
    tags: frozenset[str] = frozenset()
    alias: str | None = None
    metrics: tuple[MetricCondition, ...] = ()
    dtype: str | None = None
    tensor: str | None = None
    name_contains: str | None = None
    name_glob: str | None = None
    is_pinned: bool | None = None

    def __post_init__(self) -> None:
        for field, values, known in (
            ("format", self.formats, catalog_formats()),
            ("state", self.states, get_args(State)),
            ("verification", self.verifications, get_args(Verification)),
        ):
            if not values <= frozenset(known):
                raise InvalidQueryError(field, f"one of {', '.join(known)}")
        for field in ("run_contains", "run_glob", "tensor", "name_contains", "name_glob"):
            if (pattern := getattr(self, field)) is not None:
                check_pattern(field, pattern)
        for tag in self.tags:
            check_label("tag", tag)
        if self.alias is not None:
            check_label("alias", self.alias)
        if len(self.tags) > _MAX_CONDITIONS or len(self.metrics) > _MAX_CONDITIONS:
            raise InvalidQueryError("filter", f"{_MAX_CONDITIONS} tags and {_MAX_CONDITIONS} metrics at most")
        for field in ("min_step", "max_step"):
            if (step := getattr(self, field)) is not None and not 0 <= step <= _MAX_STEP:
                raise InvalidQueryError(field, "from 0 to 2^63 - 1")
        for field in ("since_seconds", "until_seconds"):
            if (seconds := getattr(self, field)) is not None and not math.isfinite(seconds):
                raise InvalidQueryError(field, "not a time")
        for field in ("root", "run", "dtype"):
            if (text := getattr(self, field)) is not None and "\x00" in text:
                raise InvalidQueryError(field, "there is a NUL in it")

    def mark(self) -> tuple[object, ...]:
        """The same for equal filters only, in all processes."""
        return tuple(
            sorted(value) if isinstance(value := getattr(self, name), frozenset) else value
            for name in self.__slots__
        )


@dataclass(frozen=True, slots=True)
class Sort:
    """By what, and whether the greatest comes first; among equals the same way by id.

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
        """Such as "-time", "step" or "metric:loss"; `InvalidQueryError` for anything else."""
        by, colon, metric = text.removeprefix("-").partition(":")
        return cls(by, text.startswith("-"), metric if colon else None)  # type: ignore[arg-type]
