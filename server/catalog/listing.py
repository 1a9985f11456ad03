"""Lists of checkpoints: filters, order and pages, in a time independent of the size of the catalog.

If some filter matches few rows, its index finds them, and they are tested and sorted. Otherwise rows are
read in the requested order from an index and tested until the page is full, which is soon because each
filter matches many rows. The matches of a filter are counted beforehand in its index, up to `FEW`.

SQLite gets the name of the index. Without statistics SQLite guesses, and pages by size, name or step take 20
times the steps at 100,000 checkpoints; statistics of ``PRAGMA optimize`` do not help. ``ANALYZE`` leads to
the same indexes, but must be repeated as the catalog grows. PostgreSQL keeps its own statistics; it is only
kept from reading in order when few rows match.

Facets count the checkpoints for each value of a filter, without the filter itself. Filters that are not
given count the same rows, grouped by all of their columns at once; a covering index counts a million rows in
a third of a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from sqlalchemy import ColumnElement, Connection, Select, any_, func, literal_column, select, tuple_

from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.details import joined, row_columns, with_labels
from dcp.server.catalog.filters import CheckpointFilter, RowCondition, Sort, conditions_of
from dcp.server.database.tables import COUNTED, checkpoints, metrics, roots, runs, structure_dtypes, tags
from dcp.server.records.checkpoints import Checkpoint
from dcp.server.records.declaring import OneOf, Shown
from dcp.server.records.lists import Page

FacetName = Literal["state", "verification", "format", "pinned", "root", "run", "tag", "dtype"]
"""Names of facets, equal to the filters of the list."""


@dataclass(frozen=True, slots=True)
class FacetValue:
    """A value of a filter with its number of checkpoints. ``root`` and ``run_id`` describe a run."""

    value: Annotated[str, Shown("Value of the filter.")]
    count: Annotated[int, Shown("Checkpoints with this value.")]
    root: Annotated[str | None, Shown("Of a run: name of its root.")] = None
    run_id: Annotated[int | None, Shown("Of a run: its `id`.")] = None


@dataclass(frozen=True, slots=True)
class Facet:
    """The values of one filter, most frequent first. ``is_cut``: there are more values."""

    name: Annotated[str, OneOf(FacetName)]
    values: tuple[FacetValue, ...]
    is_cut: Annotated[bool, Shown("There are further values.")]


@dataclass(frozen=True, slots=True)
class CheckpointFacets:
    """The number of listed checkpoints (``count``), and the numbers for other values of each filter."""

    count: Annotated[int, Shown("Number of listed checkpoints.")]
    is_cut: Annotated[bool, Shown("Always false: all checkpoints are counted.")]
    facets: tuple[Facet, ...]


_NEWEST_FIRST: Final = Sort()

WINDOWS: Final = (1_000, 4_000, 16_000, 64_000)
"""Rows tested per page before the page is returned incomplete."""

_Place = tuple[Any, int]
"""Sort value and id."""


def list_checkpoints(
    connection: Connection,
    wanted: CheckpointFilter,
    sort: Sort = _NEWEST_FIRST,
    cursor: str | None = None,
    limit: int = 50,
    visible: frozenset[str] | None = None,
) -> Page[Checkpoint]:
    """Return a page of the visible checkpoints that match ``wanted``.

    A page may be short or empty and have a next page: the search stops after `WINDOWS` rows, and the next
    page continues there. Rows that do not move are returned exactly once; new and moved rows may be missed
    or repeated. Raises `InvalidQueryError` for a cursor of another query.
    """
    mark = query_mark("checkpoints", wanted.mark(), sort, None if visible is None else sorted(visible))
    last = None
    if cursor is not None:
        last = decode_cursor(cursor, mark, float if sort.by == "metric" else ORDERS[sort.by][1], int)
    search = Search(connection, wanted, sort, visible)
    found, end = search.run(last, limit + 1)
    page = found[:limit]
    if len(found) > limit:
        end = page[-1]
    shown = _shown(connection, [number for _, number in page])
    return Page(tuple(shown), None if end is None else encode_cursor(mark, *end))


def neighbour(
    connection: Connection,
    found: Checkpoint,
    visible: frozenset[str] | None = None,
    *,
    is_next: bool,
    tensor: str | None = None,
) -> Checkpoint | None:
    """Return the committed checkpoint next to ``found`` by step in its run, optionally with the ``tensor``;
    else None."""
    if found.step is None or (found.step == 0 and not is_next):
        return None
    wanted = CheckpointFilter(
        run_id=found.run_id,
        tensor=tensor,
        min_step=found.step + 1 if is_next else None,
        max_step=None if is_next else found.step - 1,
    )
    order = Sort("step", descending=not is_next)
    page = list_checkpoints(connection, wanted, order, limit=1, visible=visible)
    return next(iter(page.items), None)


class Search:
    """The query plan of one list request, shared by its pages."""

    def __init__(
        self,
        connection: Connection,
        wanted: CheckpointFilter,
        sort: Sort,
        visible: frozenset[str] | None = None,
    ) -> None:
        self._connection = connection
        self._sort = sort
        self._plan = plan(connection, conditions_of(connection, wanted, visible), sort)
        self._position = order_of(sort)
        self._number = metrics.c.checkpoint_id if sort.by == "metric" else checkpoints.c.id

    def run(self, last: _Place | None, limit: int) -> tuple[list[_Place], _Place | None]:
        """Return up to ``limit`` rows after ``last``, and the stopping place if before the end."""
        found: list[_Place] = []
        for window in WINDOWS:
            end = None
            if self._plan.driver is None and self._plan.rest:
                end = self._nth(last, window)
            rows = self._connection.execute(self.query(last, end).limit(limit - len(found)))
            found += [(row.position, row.id) for row in rows]
            if end is None or len(found) == limit:
                return found, None
            last = end
        return found, last

    def query(self, last: _Place | None = None, end: _Place | None = None) -> Select[Any]:
        """Return the query of places and ids after ``last``, in order, to ``end``."""
        query = self._in_order(last).where(*(condition.test for condition in self._plan.rest))
        if end is not None:
            order = tuple_(self._position, self._number)
            query = query.where(order >= tuple_(*end) if self._sort.descending else order <= tuple_(*end))
        return select_by(self._connection, self._plan, query)

    def _nth(self, last: _Place | None, count: int) -> _Place | None:
        # Reads only the index.
        query = select_by(self._connection, self._plan, self._in_order(last)).limit(1).offset(count - 1)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else (row.position, row.id)

    def _in_order(self, last: _Place | None) -> Select[Any]:
        query = select(self._position.label("position"), self._number.label("id"))
        if self._sort.by == "metric":
            query = query.join_from(metrics, checkpoints, checkpoints.c.id == self._number)
            query = query.where(metrics.c.name == self._sort.metric)
        query = query.where(*(condition.test for condition in self._plan.by_index))
        if last is not None:
            order = tuple_(self._position, self._number)
            query = query.where(order < tuple_(*last) if self._sort.descending else order > tuple_(*last))
        for column in (self._position, self._number):
            query = query.order_by(column.desc() if self._sort.descending else column.asc())
        return query


def _shown(connection: Connection, numbers: list[int]) -> list[Checkpoint]:
    if not numbers:
        return []
    query = joined(select(*row_columns())).where(checkpoints.c.id.in_(numbers))
    rows = {row["id"]: row for row in connection.execute(query).mappings()}
    return with_labels(connection, [rows[number] for number in numbers])


# -- plans ---------------------------------------------------------------------------------------------------


FEW: Final = 5_000
"""Number of rows that can be fetched one by one and sorted in milliseconds."""

ORDERS: Final[dict[str, tuple[str, type]]] = {
    "time": ("committed_seconds", float),
    "step": ("step_order", int),
    "bytes": ("bytes", int),
    "name": ("name", str),
}
_WITHIN: Final[dict[str, tuple[str, ...]]] = {
    # of several conditions, assume that the first matches the fewest rows
    "time": ("run_id", "is_pinned", "verification", "root_id", "format", "state"),
    "step": ("run_id",),
    "bytes": (),
    "name": (),
}


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """The plan: ``driver`` finds the rows; without a driver rows are read in order, on SQLite by ``index``.

    ``rest`` are the remaining tests of each row; ``by_index`` are the conditions met by the index.
    """

    driver: RowCondition | None
    index: str | None
    by_index: Sequence[RowCondition]
    rest: Sequence[RowCondition]


def plan(connection: Connection, conditions: Sequence[RowCondition], sort: Sort) -> QueryPlan:
    """Return the plan for these conditions and this order."""
    able = [condition for condition in conditions if condition.candidates is not None]
    counts = counts_of(connection, able)
    few = [(count, number) for number, count in enumerate(counts) if count <= FEW]
    driver = able[min(few)[1]] if few else None
    singles = {each.column: each for each in conditions if each.column is not None and not each.is_range}
    within = _WITHIN.get(sort.by, ())
    if driver is not None and (driver.is_range or driver.column not in within):
        return QueryPlan(driver, None, (), [each for each in conditions if each is not driver])
    if sort.by == "metric":
        return QueryPlan(None, None, (), conditions)
    # A partial index with one of the values may have this order.
    first = driver or next((singles[name] for name in within if name in singles), None)
    column, _ = ORDERS[sort.by]
    by_index = [each for each in conditions if each is first or (each.is_range and each.column == column)]
    return QueryPlan(
        None,
        f"ix_checkpoints_{column}_id" if first is None else f"ix_checkpoints_{first.column}_{column}_id",
        by_index,
        [each for each in conditions if not any(each is one for one in by_index)],
    )


def order_of(sort: Sort) -> ColumnElement[Any]:
    """Return the sort column, which precedes the id."""
    return metrics.c.value if sort.by == "metric" else checkpoints.c[ORDERS[sort.by][0]]


def select_by(connection: Connection, chosen: QueryPlan, query: Select[Any]) -> Select[Any]:
    """Return ``query`` on `checkpoints`, forced to follow the plan."""
    if chosen.driver is None:
        if chosen.index is None:
            return query.with_hint(checkpoints, "NOT INDEXED", "sqlite")
        return query.with_hint(checkpoints, f"INDEXED BY {chosen.index}", "sqlite")
    candidates = chosen.driver.candidates
    assert candidates is not None
    if connection.dialect.name == "postgresql":
        return query.where(checkpoints.c.id == any_(func.array(candidates.scalar_subquery())))
    # By row number only: prevents other indexes.
    return query.with_hint(checkpoints, "NOT INDEXED", "sqlite").where(checkpoints.c.id.in_(candidates))


def counts_of(connection: Connection, conditions: Sequence[RowCondition]) -> list[int]:
    """Return the matches of each condition with candidates, counted up to `FEW` + 1."""
    queries = []
    for condition in conditions:
        if condition.candidates is None:
            continue
        some = condition.candidates.with_only_columns(literal_column("1")).limit(FEW + 1).subquery()
        queries.append(select(func.count()).select_from(some).scalar_subquery())
    return [int(count) for count in connection.execute(select(*queries)).one()] if queries else []


_LEFT_OUT: Final[Mapping[FacetName, Mapping[str, Any]]] = {
    "state": {"state": ("any",)},
    "verification": {"verification": ()},
    "format": {"format": ()},
    "pinned": {"pinned": None},
    "root": {"root": None},
    "run": {"run": None, "run_id": None},
    "tag": {},  # a checkpoint has several tags, and a list requires all of them
    "dtype": {"dtype": None},
}
_COLUMNS: Final[Mapping[FacetName, str]] = {
    "state": "state",
    "verification": "verification",
    "format": "format",
    "pinned": "is_pinned",
    "root": "root_id",
    "run": "run_id",
    "dtype": "structure_id",
}


def checkpoint_facets(
    connection: Connection,
    wanted: CheckpointFilter,
    visible: frozenset[str] | None = None,
    *,
    limit: int = 20,
) -> CheckpointFacets:
    """Return counts of visible checkpoints, with up to ``limit`` values of each filter."""
    counted: dict[CheckpointFilter, _Counted] = {}

    def of(filtered: CheckpointFilter) -> _Counted:
        if filtered not in counted:
            counted[filtered] = _Counted(connection, filtered, visible)
        return counted[filtered]

    facets = tuple(
        of(wanted.model_copy(update=left_out)).facet(name, limit) for name, left_out in _LEFT_OUT.items()
    )
    return CheckpointFacets(of(wanted).count, is_cut=False, facets=facets)


class _Counted:
    """The checkpoints of one filter, grouped by column values."""

    def __init__(
        self, connection: Connection, wanted: CheckpointFilter, visible: frozenset[str] | None
    ) -> None:
        self._connection = connection
        conditions = conditions_of(connection, wanted, visible)
        chosen = plan(connection, conditions, Sort())
        if chosen.driver is None and all(each.column in _COLUMNS.values() for each in conditions):
            chosen = QueryPlan(None, COUNTED, (), conditions)
        query = select(checkpoints.c.id).where(*(each.test for each in (*chosen.by_index, *chosen.rest)))
        query = select_by(connection, chosen, query)
        self._found = query.subquery()
        columns = [checkpoints.c[name] for name in _COLUMNS.values()]
        grouped = query.with_only_columns(*columns, func.count()).group_by(*columns)
        self._rows = connection.execute(grouped).all()
        self.count = sum(row[-1] for row in self._rows)

    def facet(self, name: FacetName, limit: int) -> Facet:
        """Return the most frequent values."""
        counts = self._of_tags(limit) if name == "tag" else self._of_column(name)
        if name == "dtype":
            counts = self._of_dtypes(counts)
        best = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
        return Facet(name, self._values(name, best[:limit]), len(best) > limit)

    def _of_column(self, name: FacetName) -> Counter[Any]:
        place = list(_COLUMNS).index(name)
        counts: Counter[Any] = Counter()
        for row in self._rows:
            counts[row[place]] += row[-1]
        del counts[None]  # unknown structure
        return counts

    def _of_tags(self, limit: int) -> Counter[Any]:
        number = func.count().label("number")
        query = select(tags.c.tag, number).join(self._found, self._found.c.id == tags.c.checkpoint_id)
        query = query.group_by(tags.c.tag).order_by(number.desc(), tags.c.tag).limit(limit + 1)
        return Counter({row.tag: row.number for row in self._connection.execute(query)})

    def _of_dtypes(self, structures: Mapping[int, int]) -> Counter[Any]:
        counts: Counter[Any] = Counter()
        for some in _some(sorted(structures)):
            query = select(structure_dtypes.c.structure_id, structure_dtypes.c.dtype)
            for number, dtype in self._connection.execute(
                query.where(structure_dtypes.c.structure_id.in_(some))
            ):
                counts[dtype] += structures[number]
        return counts

    def _values(self, name: FacetName, best: Sequence[tuple[Any, int]]) -> tuple[FacetValue, ...]:
        numbers = [value for value, _ in best]
        if name == "root":
            query: Select[Any] = select(roots.c.id, roots.c.name).where(roots.c.id.in_(numbers))
            names = {row.id: row.name for row in self._connection.execute(query)}
            return tuple(FacetValue(names[value], count) for value, count in best)
        if name == "run":
            query = select(runs.c.id, runs.c.key, roots.c.name).join(roots, roots.c.id == runs.c.root_id)
            found = {row.id: row for row in self._connection.execute(query.where(runs.c.id.in_(numbers)))}
            return tuple(
                FacetValue(found[value].key, count, found[value].name, value) for value, count in best
            )
        if name == "pinned":
            return tuple(FacetValue("true" if value else "false", count) for value, count in best)
        return tuple(FacetValue(value, count) for value, count in best)


def _some(numbers: Sequence[int]) -> Iterable[Sequence[int]]:
    return (numbers[begin : begin + 500] for begin in range(0, len(numbers), 500))
