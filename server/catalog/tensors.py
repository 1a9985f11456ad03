"""Tensors and values of a structure, page by page, or as a tree by the dots in their names."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Select, case, func, literal, select

from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark, read_page
from dcp.server.catalog.names import check_pattern, in_order, is_of_optimizer, matches
from dcp.server.database.records import record_of_row
from dcp.server.database.tables import structure_tensors
from dcp.server.records.contents import EntryKind, Tensor, TreeNode
from dcp.server.records.lists import Page

__all__ = ["TreePart", "parts_of", "tensors_page", "tree_level"]

_COUNTED: Final = 2000
"""Names of one level of a tree that are put in order as people count; more would be read for each page."""


_PARTS: Final = 12
_LONG_NAME: Final = 80
"""Longer names are not those of a model or an optimizer, and no globs."""


@dataclass(frozen=True, slots=True)
class TreePart:
    """All that is below ``name``, tensors of ``bytes``."""

    name: str
    tensors: int
    bytes: int

    @property
    def is_optimizer(self) -> bool:
        """Whether it belongs to an optimizer, by its name."""
        return is_of_optimizer(self.name)


def tensors_page(
    connection: Connection,
    structure_id: int,
    *,
    limit: int,
    cursor: str | None = None,
    glob: str | None = None,
    kind: EntryKind | None = None,
    dtype: str | None = None,
) -> Page[Tensor]:
    """Entries whose names match ``glob``, of one kind and dtype if these are given.

    Raises `InvalidQueryError` for a glob or cursor that cannot be meant.
    """
    table = structure_tensors.c
    mark = query_mark("tensors", structure_id, glob, kind, dtype)
    query = select(table.position, table.fqn, table.kind, table.dtype, table.shape, table.bytes).where(
        table.structure_id == structure_id
    )
    if glob is not None:
        query = query.where(matches(connection, table.fqn, check_pattern("glob", glob)))
    if kind is not None:
        query = query.where(table.kind == kind)
    if dtype is not None:
        query = query.where(table.dtype == dtype)
    key = (table.position, int)
    return read_page(connection, query, _entry, mark, key, cursor=cursor, limit=limit)


def tree_level(
    connection: Connection, structure_id: int, prefix: str, *, limit: int, cursor: str | None = None
) -> Page[TreeNode]:
    """The names directly below ``prefix``, a name without its last dot; "" is the top.

    Raises `InvalidQueryError` for a cursor that cannot be meant.
    """
    table = structure_tensors.c
    start = f"{prefix}." if prefix else ""
    mark = query_mark("tree", structure_id, prefix)
    rest = func.substr(table.fqn, len(start) + 1)
    dot = _place_of_dot(connection, rest)
    name = _by_character(connection, case((dot > 0, func.substr(rest, 1, dot - 1)), else_=rest))
    is_tensor = case((table.kind == "tensor", 1), else_=0)
    query = select(
        name.label("name"),
        func.sum(is_tensor).label("tensors"),
        func.count().label("entries"),
        func.sum(table.bytes).label("bytes"),
    ).where(table.structure_id == structure_id)
    if start:
        query = query.where(func.substr(table.fqn, 1, len(start)) == start)
    last = None if cursor is None else decode_cursor(cursor, mark, str)[0]
    rows = _ordered(connection, query.group_by(name).order_by(name), name, last, limit + 1)
    shown = rows[:limit]
    own = _entries(connection, structure_id, [f"{start}{row.name}" for row in shown])
    nodes = tuple(
        TreeNode(
            row.name,
            int(row.tensors),
            int(row.entries) - int(row.tensors),
            int(row.bytes),
            own.get(f"{start}{row.name}"),
        )
        for row in shown
    )
    return Page(nodes, encode_cursor(mark, nodes[-1].name) if len(rows) > limit else None)


def parts_of(connection: Connection, structure_id: int | None) -> list[TreePart]:
    """The parts of a checkpoint, such as a model and its optimizer: the top of the tree, and the level below
    a name that holds an optimizer among others. Nothing where there are many."""
    if structure_id is None:
        return []
    top = _parts_below(connection, structure_id, "")
    if any(one.is_optimizer for one in top):
        return top
    parts: list[TreePart] = []
    for one in top:
        inner = _parts_below(connection, structure_id, one.name)
        parts += inner if any(each.is_optimizer for each in inner) else [one]
    return parts


def _parts_below(connection: Connection, structure_id: int, prefix: str) -> list[TreePart]:
    nodes = tree_level(connection, structure_id, prefix, limit=_PARTS + 1).items
    start = f"{prefix}." if prefix else ""
    return [
        TreePart(f"{start}{one.name}", one.tensors, one.bytes)
        for one in (nodes if len(nodes) <= _PARTS else ())
        if one.tensors and one.entry is None and len(one.name) < _LONG_NAME
    ]


def _ordered(
    connection: Connection, query: Select[Any], name: ColumnElement[Any], last: str | None, limit: int
) -> Sequence[Row[Any]]:
    """The rows behind the name ``last``, as people count; by code point where there are very many."""
    rows = connection.execute(query.limit(_COUNTED + 1)).all()
    if len(rows) > _COUNTED and last is None:
        return rows[:limit]
    if len(rows) > _COUNTED:
        return connection.execute(query.where(name > literal(last)).limit(limit)).all()
    found = sorted(rows, key=lambda row: (in_order(row.name), row.name))
    start = (
        0
        if last is None
        else bisect_right(found, (in_order(last), last), key=lambda row: (in_order(row.name), row.name))
    )
    return found[start : start + limit]


def _entries(connection: Connection, structure_id: int, names: Sequence[str]) -> dict[str, Tensor]:
    table = structure_tensors.c
    if not names:
        return {}
    query = select(table.fqn, table.kind, table.dtype, table.shape, table.bytes).where(
        table.fqn.in_(names), table.structure_id == structure_id
    )
    return {row.fqn: _entry(row) for row in connection.execute(query)}


_entry: Final = partial(record_of_row, Tensor)


def _place_of_dot(connection: Connection, text: ColumnElement[Any]) -> ColumnElement[Any]:
    found = func.strpos if connection.dialect.name == "postgresql" else func.instr
    return found(text, ".")


def _by_character(connection: Connection, text: ColumnElement[Any]) -> ColumnElement[Any]:
    """Compared by code points on both: PostgreSQL goes by the language of the server otherwise."""
    return text.collate("C") if connection.dialect.name == "postgresql" else text
