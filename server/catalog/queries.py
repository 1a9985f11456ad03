"""Lists of checkpoints: filtered, in order, page by page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, select, tuple_

from dcp.server.catalog.conditions import conditions_of
from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.details import Checkpoint, joined, row_columns, with_labels
from dcp.server.catalog.filters import CheckpointFilter, MetricCondition, Sort
from dcp.server.catalog.planning import ORDERS, order_of, plan, select_by
from dcp.server.database.tables import checkpoints, metrics

__all__ = ["CheckpointFilter", "CheckpointPage", "MetricCondition", "Sort", "list_checkpoints", "page_query"]

_NEWEST_FIRST = Sort()


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

    What is written between two pages may be missed or, if it moves in the order, be seen twice; all that
    stays where it is is seen once. Raises `InvalidQueryError` for a cursor of another query.
    """
    mark = query_mark("checkpoints", wanted.mark(), sort, None if visible is None else sorted(visible))
    last = None
    if cursor is not None:
        last = decode_cursor(cursor, mark, float if sort.by == "metric" else ORDERS[sort.by][1], int)
    found = connection.execute(page_query(connection, wanted, sort, visible, last).limit(limit + 1)).all()
    page = found[:limit]
    next_cursor = encode_cursor(mark, page[-1].position, page[-1].id) if len(found) > limit else None
    return CheckpointPage(_shown(connection, [row.id for row in page]), next_cursor)


def page_query(
    connection: Connection,
    wanted: CheckpointFilter,
    sort: Sort,
    visible: frozenset[str] | None = None,
    last: tuple[Any, ...] | None = None,
) -> Select[Any]:
    """The ids and positions of those that follow ``last``, in order."""
    conditions = conditions_of(connection, wanted, visible)
    chosen = plan(connection, conditions, sort)
    position = order_of(sort)
    number = checkpoints.c.id
    query = select(number, position.label("position")).where(
        *(condition.test for condition in conditions if condition is not chosen.driver)
    )
    if sort.by == "metric":
        number = metrics.c.checkpoint_id  # as it is in the index by value
        query = query.join_from(metrics, checkpoints, checkpoints.c.id == number)
        query = query.where(metrics.c.name == sort.metric)
    if last is not None:
        order, before = tuple_(position, number), tuple_(*last)
        query = query.where(order < before if sort.descending else order > before)
    for column in (position, number):
        query = query.order_by(column.desc() if sort.descending else column.asc())
    return select_by(connection, chosen, query)


def _shown(connection: Connection, numbers: list[int]) -> list[Checkpoint]:
    if not numbers:
        return []
    query = joined(select(*row_columns())).where(checkpoints.c.id.in_(numbers))
    rows = {row["id"]: row for row in connection.execute(query).mappings()}
    return with_labels(connection, [rows[number] for number in numbers])
