"""How a page of checkpoints is found, so that the time does not grow with the catalog.

Two ways. Either some filter leaves few rows: these are taken by the filter's index, tested, and sorted. Or
none does: then the rows are read in the order asked for, from an index that has this order, and tested until
the page is full, which is soon because what each filter leaves is many. How many a filter leaves is counted
beforehand, up to `FEW`, in its index.

SQLite is told which index to take. Without statistics it guesses: pages in order of size, name or step take
20 times the steps at 100,000 checkpoints, and more with each one; with those of ``PRAGMA optimize`` they
still do. A whole ``ANALYZE`` leads it to the same indexes, but is to be made anew as the catalog grows, and
is seen by connections that are opened after it. PostgreSQL keeps statistics by itself: it is only kept from
reading in order what few rows would have answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, any_, func, literal_column, select

from dcp.server.catalog.queries.conditions import RowCondition
from dcp.server.catalog.queries.filters import Sort
from dcp.server.database.tables import checkpoints, metrics

__all__ = ["FEW", "ORDERS", "QueryPlan", "counts_of", "order_of", "plan", "select_by"]

FEW: Final = 5_000
"""Rows that are taken one by one and sorted in some milliseconds."""

ORDERS: Final[dict[str, tuple[str, type]]] = {
    "time": ("committed_seconds", float),
    "step": ("step_order", int),
    "bytes": ("bytes", int),
    "name": ("name", str),
}
_WITHIN: Final[dict[str, tuple[str, ...]]] = {
    # of several, the first is thought to leave the fewest
    "time": ("run_id", "is_pinned", "verification", "root_id", "format", "state"),
    "step": ("run_id",),
    "bytes": (),
    "name": (),
}


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """``driver`` finds the rows; without one they are read in order, on SQLite by ``index``.

    ``rest`` is what each row is still tested for, ``by_index`` what the index says of all that are read.
    """

    driver: RowCondition | None
    index: str | None
    by_index: Sequence[RowCondition]
    rest: Sequence[RowCondition]


def plan(connection: Connection, conditions: Sequence[RowCondition], sort: Sort) -> QueryPlan:
    """The way for these conditions and this order."""
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
    # Few or not: there may be an index of just the rows with one of the values, in this order.
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
    """The column to sort by, before the id."""
    return metrics.c.value if sort.by == "metric" else checkpoints.c[ORDERS[sort.by][0]]


def select_by(connection: Connection, chosen: QueryPlan, query: Select[Any]) -> Select[Any]:
    """``query``, which has `checkpoints`, so that it goes the chosen way."""
    if chosen.driver is None:
        if chosen.index is None:
            return query.with_hint(checkpoints, "NOT INDEXED", "sqlite")
        return query.with_hint(checkpoints, f"INDEXED BY {chosen.index}", "sqlite")
    candidates = chosen.driver.candidates
    assert candidates is not None
    if connection.dialect.name == "postgresql":
        return query.where(checkpoints.c.id == any_(func.array(candidates.scalar_subquery())))
    # By row number only: not indexed is everything else.
    return query.with_hint(checkpoints, "NOT INDEXED", "sqlite").where(checkpoints.c.id.in_(candidates))


def counts_of(connection: Connection, conditions: Sequence[RowCondition]) -> list[int]:
    """How many rows each of the conditions leaves that can be looked up; `FEW` and one is "many"."""
    queries = []
    for condition in conditions:
        if condition.candidates is None:
            continue
        some = condition.candidates.with_only_columns(literal_column("1")).limit(FEW + 1).subquery()
        queries.append(select(func.count()).select_from(some).scalar_subquery())
    return [int(count) for count in connection.execute(select(*queries)).one()] if queries else []
