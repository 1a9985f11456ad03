"""Lists of checkpoints: filtered, in order, page by page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, select, tuple_

from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.details import Checkpoint, joined, row_columns, with_labels
from dcp.server.catalog.queries.conditions import conditions_of
from dcp.server.catalog.queries.filters import CheckpointFilter, MetricCondition, Sort
from dcp.server.catalog.queries.planning import ORDERS, order_of, plan, select_by
from dcp.server.database.tables import checkpoints, metrics

__all__ = [
    "WINDOWS",
    "CheckpointFilter",
    "CheckpointPage",
    "MetricCondition",
    "Search",
    "Sort",
    "list_checkpoints",
    "neighbour",
]

_NEWEST_FIRST: Final = Sort()

WINDOWS: Final = (1_000, 4_000, 16_000, 64_000)
"""Rows that are tested one after the other before a page is answered as it is."""

_Place = tuple[Any, int]
"""What is sorted by, and the id."""


@dataclass(frozen=True, slots=True)
class CheckpointPage:
    """Checkpoints in order, and where the next page begins: None at the end."""

    checkpoints: list[Checkpoint]
    next_cursor: str | None


def list_checkpoints(
    connection: Connection,
    wanted: CheckpointFilter,
    sort: Sort = _NEWEST_FIRST,
    cursor: str | None = None,
    limit: int = 50,
    visible: frozenset[str] | None = None,
) -> CheckpointPage:
    """A page of those that ``wanted`` leaves, and that may be seen.

    A page may have fewer than ``limit``, even none, and a next one: where filters that each leave many leave
    next to nothing together, the search stops after `WINDOWS` rows, and the next page goes on there.

    What is written between two pages may be missed or, if it moves in the order, be seen twice; all that
    stays where it is is seen once. Raises `InvalidQueryError` for a cursor of another query.
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
    return CheckpointPage(shown, None if end is None else encode_cursor(mark, *end))


def neighbour(
    connection: Connection,
    found: Checkpoint,
    visible: frozenset[str] | None = None,
    *,
    is_next: bool,
    tensor: str | None = None,
) -> Checkpoint | None:
    """The committed checkpoint of the run that comes next to ``found`` by step, of those that have the
    ``tensor``, if it is given; None without any."""
    if found.step is None or (found.step == 0 and not is_next):
        return None
    wanted = CheckpointFilter(
        run_id=found.run_id,
        states=frozenset({"committed"}),
        tensor=tensor,
        min_step=found.step + 1 if is_next else None,
        max_step=None if is_next else found.step - 1,
    )
    order = Sort("step", descending=not is_next)
    page = list_checkpoints(connection, wanted, order, limit=1, visible=visible)
    return next(iter(page.checkpoints), None)


class Search:
    """The way to the pages of one question, chosen once."""

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
        """Up to ``limit`` rows behind ``last``, and where the search stopped if before the end."""
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
        """Positions and ids of what follows ``last``, in order, to ``end``."""
        query = self._in_order(last).where(*(condition.test for condition in self._plan.rest))
        if end is not None:
            order = tuple_(self._position, self._number)
            query = query.where(order >= tuple_(*end) if self._sort.descending else order <= tuple_(*end))
        return select_by(self._connection, self._plan, query)

    def _nth(self, last: _Place | None, count: int) -> _Place | None:
        # Of the index alone, which is quick.
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
