"""Filters and sort orders of checkpoint lists as SQL, with validation of names.

A filter is a test of a row, and selects candidate rows (`RowCondition.candidates`) where an index is
selective; `dcp.server.catalog.listing` counts them. Unknown roots, runs and metrics are refused, since an
empty page would hide a typing error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import Field
from sqlalchemy import ColumnElement, Connection, Select, Table, and_, exists, false, func, select

from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.inputs import FormatName, Id, Name, Query, Step, Text, Time, check_label
from dcp.server.catalog.names import check_pattern, contains, is_glob, matches
from dcp.server.catalog.runs import RootRow, RunFilter, list_roots
from dcp.server.database.tables import (
    aliases,
    checkpoint_names,
    checkpoints,
    metrics,
    roots,
    runs,
    structure_dtypes,
    structure_tensors,
    structures,
    tags,
)
from dcp.server.records.checkpoints import CheckpointDetail, State, Verdict
from dcp.server.records.declaring import Within, fields_of
from dcp.storage.near_names import close_to, listed

Comparison = Literal["<", "<=", "=", "!=", ">=", ">"]
SortBy = Literal["time", "step", "bytes", "name", "metric"]

_CONDITION: Final = re.compile(r"([A-Za-z0-9_./:@+-]+?)\s*(<=|>=|!=|==|=|<|>)\s*(\S+)")


@dataclass(frozen=True, slots=True)
class MetricCondition:
    """A comparison with the value of a metric."""

    name: str
    comparison: Comparison
    value: float

    def __post_init__(self) -> None:
        check_label("metric", self.name)
        if self.comparison not in get_args(Comparison) or not math.isfinite(self.value):
            raise InvalidQueryError("metric", "expected a comparison with a finite number, such as loss<2.5")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a comparison such as "loss<2.5". Raises `InvalidQueryError`."""
        found = _CONDITION.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError
            comparison = "=" if found[2] == "==" else found[2]
            return cls(found[1], comparison, float(found[3]))  # type: ignore[arg-type]  # __post_init__ checks
        except ValueError:
            raise InvalidQueryError(
                "metric", "expected name, comparison and number, such as loss<2.5"
            ) from None


_Pattern = Annotated[Text, Field(min_length=1, max_length=256)]
SortText = Annotated[
    str,
    Field(
        max_length=140,
        pattern=r"^-?(time|step|bytes|name|metric:[A-Za-z0-9_][A-Za-z0-9_./:@+=-]*)$",
        description="time, step, bytes, name or metric:NAME; a minus means descending.",
    ),
]
RootName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class CheckpointFilter(Query):
    """Filters of checkpoint lists, in API queries and page addresses.

    All given filters must match. Of several values of one filter any must match, but all tags must. Filters
    of a column are declared at its field in `dcp.server.records.checkpoints`.
    """

    root: Annotated[RootName | None, Field(description="Name of a root.")] = None
    run_id: Annotated[Id | None, Field(description="The `id` of a run.")] = None
    run: Annotated[
        Annotated[Text, Field(max_length=1024)] | None,
        Field(description="Key of a run: its path in the root."),
    ] = None
    run_contains: Annotated[_Pattern | None, Field(description="Part of the key of the run.")] = None
    run_glob: Annotated[_Pattern | None, Field(description="Glob for the key of the run.")] = None
    min_step: Annotated[Step | None, Field(description="Lowest step, inclusive.")] = None
    max_step: Annotated[Step | None, Field(description="Highest step, inclusive.")] = None
    since: Annotated[Time | None, Field(description="Commit time, inclusive.")] = None
    until: Annotated[Time | None, Field(description="Commit time, exclusive.")] = None
    format: Annotated[
        tuple[FormatName, ...],
        Field(max_length=8, description="Formats of the files; any of them matches."),
    ] = ()
    state: Annotated[
        tuple[State | Literal["any"], ...],
        Field(max_length=8, description="States; any of them matches. Default: committed."),
    ] = ()
    verification: Annotated[
        tuple[Verdict, ...],
        Field(max_length=8, description="Results of the last verification; any of them matches."),
    ] = ()
    tag: Annotated[
        tuple[Name, ...], Field(max_length=8, description="Tags; the checkpoint has all of them.")
    ] = ()
    alias: Annotated[Name | None, Field(description="Alias of the checkpoint, such as best.")] = None
    metric: Annotated[
        tuple[_Pattern, ...],
        Field(max_length=8, description="Comparisons such as loss<2.5.", examples=[["loss<2.5"]]),
    ] = ()
    dtype: Annotated[
        Annotated[str, Field(max_length=32, pattern=r"^[A-Za-z0-9_.-]+$")] | None,
        Field(description="The checkpoint has a tensor of this dtype, such as bfloat16."),
    ] = None
    tensor: Annotated[
        _Pattern | None, Field(description="The checkpoint has a tensor with this name or glob.")
    ] = None
    name_contains: Annotated[_Pattern | None, Field(description="Part of the name of the checkpoint.")] = None
    name_glob: Annotated[
        _Pattern | None, Field(description="Glob for the name of the checkpoint; * matches any characters.")
    ] = None
    pinned: Annotated[bool | None, Field(description="true: only pinned; false: only without a pin.")] = None
    registered_by: Annotated[
        Annotated[Text, Field(min_length=1, max_length=128)] | None,
        Field(description="Account or key that registered the checkpoint, such as key:alice."),
    ] = None

    def model_post_init(self, context: Any) -> None:
        """Check patterns and comparisons. Raises InvalidQueryError."""
        _ = self.metrics
        for field in ("run_contains", "run_glob", "tensor", "name_contains", "name_glob"):
            if (pattern := getattr(self, field)) is not None:
                check_pattern(field, pattern)

    @property
    def states(self) -> tuple[str, ...]:
        """The states of listed checkpoints; empty for all."""
        return () if "any" in self.state else self.state or ("committed",)

    @property
    def metrics(self) -> tuple[MetricCondition, ...]:
        """The comparisons with metrics."""
        return tuple(MetricCondition.parse(text) for text in self.metric)

    def mark(self) -> tuple[object, ...]:
        """Return a hash that is equal for equal filters in all processes."""
        values = (getattr(self, name) for name in CheckpointFilter.model_fields)
        return tuple(sorted(value) if isinstance(value, tuple) else value for value in values)


@dataclass(frozen=True, slots=True)
class Sort:
    """A sort key with direction; ties are ordered by id in the same direction.

    Without a step, checkpoints sort before step 0. Sorting by a metric excludes checkpoints without the
    metric.
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
        """Parse an order such as "-time", "step" or "metric:loss". Raises `InvalidQueryError`."""
        by, colon, metric = text.removeprefix("-").partition(":")
        return cls(by, text.startswith("-"), metric if colon else None)  # type: ignore[arg-type]


# -- as SQL --------------------------------------------------------------------------------------------------


_c: Final = checkpoints.c


def _where(test: ColumnElement[bool]) -> Select[Any]:
    # not correlated with an outer query on the same table
    return select(_c.id).where(test).correlate(None)


@dataclass(frozen=True, slots=True)
class RowCondition:
    """A ``test`` of a row, and optional ``candidates``: a query of the ids of all matching rows.

    ``column``: the test only compares this column with a value, or with a range (``is_range``).
    """

    test: ColumnElement[bool]
    candidates: Select[Any] | None = None
    column: str | None = None
    is_range: bool = False


def conditions_of(
    connection: Connection, wanted: CheckpointFilter, visible: frozenset[str] | None
) -> list[RowCondition]:
    """Return the conditions of a filter for a caller who sees these roots."""
    return [
        *_of_places(connection, wanted, visible),
        *_of_columns(wanted),
        *_of_ranges(wanted),
        *_of_labels(wanted),
        *_of_structures(connection, wanted),
        *_of_names(connection, wanted),
    ]


def _of_places(
    connection: Connection, wanted: CheckpointFilter, visible: frozenset[str] | None
) -> list[RowCondition]:
    found = []
    names = visible
    if wanted.root is not None:
        names = frozenset({wanted.root}) if visible is None else visible & {wanted.root}
    if names is not None:
        query = select(roots.c.id).where(roots.c.name.in_(sorted(names)))
        numbers = list(connection.execute(query).scalars())
        found.append(_among("root_id", numbers))
    run_ids = _run_ids(connection, wanted)
    if run_ids is not None:
        found.append(run_ids)
    return found


def _run_ids(connection: Connection, wanted: CheckpointFilter) -> RowCondition | None:
    if wanted.run_id is not None and wanted.run is None:
        if wanted.run_contains is None and wanted.run_glob is None:
            return _among("run_id", [wanted.run_id])
    elif wanted.run is None and wanted.run_contains is None and wanted.run_glob is None:
        return None
    query = select(runs.c.id).join_from(runs, roots, roots.c.id == runs.c.root_id)
    if wanted.run_id is not None:
        query = query.where(runs.c.id == wanted.run_id)
    if wanted.run is not None:
        query = query.where(runs.c.key == wanted.run)
    also = RunFilter(root=wanted.root, contains=wanted.run_contains, glob=wanted.run_glob)
    query = also.apply(connection, query)
    if wanted.run is not None:
        return _among("run_id", list(connection.execute(query).scalars()))
    test = _c.run_id.in_(query)
    return RowCondition(test, _where(test))


def _of_columns(wanted: CheckpointFilter) -> list[RowCondition]:
    found = []
    for field in fields_of(CheckpointDetail):
        if field.any_of is not None:
            value = getattr(wanted, field.any_of.name)
            values = sorted({*value}) if isinstance(value, tuple) else [] if value is None else [value]
            if values:
                found.append(_among(field.column, values))
    return found


def _among(column: str, values: list[Any]) -> RowCondition:
    if not values:
        return RowCondition(false(), _where(false()))
    if len(values) == 1:
        test = _c[column] == values[0]
        return RowCondition(test, _where(test), column)
    test = _c[column].in_(values)
    return RowCondition(test, _where(test))


def _of_ranges(wanted: CheckpointFilter) -> list[RowCondition]:
    found = []
    for field in fields_of(CheckpointDetail):
        if field.within is not None:
            name = field.within.column or field.column
            tests = _tests_of_range(wanted, field.within, _c[name])
            if tests:
                test = and_(*tests)
                found.append(RowCondition(test, _where(test), name, is_range=True))
    return found


def _tests_of_range(
    wanted: CheckpointFilter, within: Within, column: ColumnElement[Any]
) -> list[ColumnElement[bool]]:
    least, most, below = (
        getattr(wanted, name) if name else None for name in (within.least, within.most, within.below)
    )
    if least is None and within.column and (most is not None or below is not None):
        least = 0  # NULL matches no range
    return [
        *([column >= least] if least is not None else []),
        *([column <= most] if most is not None else []),
        *([column < below] if below is not None else []),
    ]


def _of_labels(wanted: CheckpointFilter) -> list[RowCondition]:
    return [
        *(_labelled(tags, tags.c.tag == tag) for tag in sorted({*wanted.tag})),
        *([_labelled(aliases, aliases.c.name == wanted.alias)] if wanted.alias is not None else []),
        *(
            _labelled(metrics, metrics.c.name == one.name, metrics.c.value.bool_op(one.comparison)(one.value))
            for one in wanted.metrics
        ),
    ]


def _labelled(table: Table, *tests: ColumnElement[bool]) -> RowCondition:
    """Return the condition that a row of ``table`` meets the tests and belongs to the checkpoint."""
    test = exists().where(table.c.checkpoint_id == _c.id, *tests).correlate(checkpoints)
    return RowCondition(test, select(table.c.checkpoint_id).where(*tests))


def _of_structures(connection: Connection, wanted: CheckpointFilter) -> list[RowCondition]:
    queries: list[Select[Any]] = []
    if wanted.dtype is not None:
        queries.append(
            select(structure_dtypes.c.structure_id).where(structure_dtypes.c.dtype == wanted.dtype)
        )
    if wanted.tensor is not None:
        names = structure_tensors.c.fqn
        if is_glob(wanted.tensor):
            # Structures are few; EXISTS stops at the first match.
            own = (
                exists()
                .where(
                    structure_tensors.c.structure_id == structures.c.id,
                    matches(connection, names, wanted.tensor),
                )
                .correlate(structures)
            )
            queries.append(select(structures.c.id).where(own))
        else:
            queries.append(select(structure_tensors.c.structure_id).where(names == wanted.tensor))
    tests = [_c.structure_id.in_(query) for query in queries]
    return [RowCondition(test, _where(test)) for test in tests]


def _of_names(connection: Connection, wanted: CheckpointFilter) -> list[RowCondition]:
    found = []
    for make, pattern in ((contains, wanted.name_contains), (matches, wanted.name_glob)):
        if pattern is not None:
            known = select(checkpoint_names.c.name).where(make(connection, checkpoint_names.c.name, pattern))
            candidates = _where(_c.name.in_(known))
            found.append(RowCondition(make(connection, _c.name, pattern), candidates))
    return found


_LOOKED_AT: Final = 5_000
_METRICS: Final = 200


def check_filter(
    connection: Connection, wanted: CheckpointFilter, sort: Sort, visible: frozenset[str] | None
) -> None:
    """Raise InvalidQueryError for unknown roots, runs or metrics, with similar names.

    Only visible names count. Before the first scan of a root ends, unknown runs and metrics are accepted.
    """
    seen = list_roots(connection, visible)
    _check_root(wanted.root, seen)
    mine = [row for row in seen if wanted.root in (None, row.name)]
    if any(_is_new(row) for row in mine):
        return
    if wanted.run is not None or wanted.run_id is not None:
        _check_run(connection, wanted, [row.id for row in mine])
    for name in {condition.name for condition in wanted.metrics} | ({sort.metric} - {None}):
        if name is not None:
            _check_metric(connection, name, visible)


def check_root(connection: Connection, root: str | None, visible: frozenset[str] | None) -> None:
    """Raise InvalidQueryError for an unknown or invisible root."""
    if root is not None:
        _check_root(root, list_roots(connection, visible))


def notes_of(connection: Connection, root: str | None, visible: frozenset[str] | None) -> list[str]:
    """Return reasons for missing rows in a list of one root, or of all."""
    notes = []
    for row in list_roots(connection, visible):
        if root not in (None, row.name) or not row.is_configured:
            continue
        if _is_new(row):
            notes.append(f"the first scan of root {row.name} has not ended: checkpoints may be missing")
        elif row.scan_error is not None:
            notes.append(f"the last scan of root {row.name}: {row.scan_error}")
    return notes


def _is_new(row: RootRow) -> bool:
    return row.is_configured and row.scanned_seconds is None


def _check_root(root: str | None, seen: Iterable[RootRow]) -> None:
    names = [row.name for row in seen]
    if root is not None and root not in names:
        raise _unknown("root", root, names)


def _check_run(connection: Connection, wanted: CheckpointFilter, root_ids: list[int]) -> None:
    mine = runs.c.root_id.in_(root_ids)
    if wanted.run_id is not None:
        query = select(runs.c.id).where(runs.c.id == wanted.run_id, mine)
        if connection.execute(query).first() is None:
            raise InvalidQueryError("run_id", f"run {wanted.run_id} not found")
    if wanted.run is None:
        return
    if connection.execute(select(runs.c.id).where(runs.c.key == wanted.run, mine).limit(1)).first() is None:
        newest = select(runs.c.key).where(mine).order_by(runs.c.id.desc()).limit(_LOOKED_AT)
        raise _unknown("run", wanted.run, list(connection.execute(newest).scalars()))


def _check_metric(connection: Connection, name: str, visible: frozenset[str] | None) -> None:
    if not _has_metric(connection, name, visible):
        names = [near for near in _names_of_metrics(connection) if _has_metric(connection, near, visible)]
        raise _unknown("metric", name, names)


def _has_metric(connection: Connection, name: str, visible: frozenset[str] | None) -> bool:
    query = select(metrics.c.name).where(metrics.c.name == name).limit(1)
    if visible is not None:
        query = query.join(checkpoints, checkpoints.c.id == metrics.c.checkpoint_id)
        query = query.join(roots, roots.c.id == checkpoints.c.root_id)
        query = query.where(roots.c.name.in_(sorted(visible)))
    return connection.execute(query).first() is not None


def _names_of_metrics(connection: Connection) -> list[str]:
    """Return the distinct names with one index step per name, since each name has many thousand rows."""
    names: list[str] = []
    while len(names) < _METRICS:
        query = select(func.min(metrics.c.name))
        found = connection.execute(query.where(metrics.c.name > names[-1]) if names else query).scalar()
        if found is None:
            break
        names.append(found)
    return names


def _unknown(what: str, name: str, names: list[str]) -> InvalidQueryError:
    last = name.rpartition("/")[2]
    same = [other for other in names if other.rpartition("/")[2] == last] if last else []
    near = list(dict.fromkeys([*same, *close_to(name, names)]))
    hint = f"; did you mean {listed(near)}?" if near else ""
    return InvalidQueryError(what, f"{what} {name[:200]!r} not found{hint}")
