"""Structures: names, shapes and dtypes of tensors, shared between checkpoints.

A large structure is written as a draft (`dcp.server.database.documents`) before the transaction that refers
to it, so other writers do not wait for hundreds of thousands of rows. The draft gets its digest with the
last rows.

The search tests patterns of names: lower case, with "#" for each number. A million names have a few hundred
patterns, because layers differ only by numbers.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgpack
from sqlalchemy import ColumnElement, Connection, Row, Select, case, func, insert, literal, select, update
from sqlalchemy.exc import IntegrityError

from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark, read_page
from dcp.server.catalog.inputs import clean_integer, clean_text, short_name
from dcp.server.catalog.names import check_pattern, in_order, is_of_optimizer, matches, pattern_of
from dcp.server.database.documents import STRUCTURES
from dcp.server.database.engine import Database, dialect_insert, insert_missing
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import (
    structure_dtypes,
    structure_patterns,
    structure_tensors,
    structures,
    tensor_patterns,
)
from dcp.server.records.declaring import OneOf, Shown
from dcp.server.records.lists import Page

EntryKind = Literal["tensor", "object"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, or another value (``kind`` "object", without dtype and shape)."""

    fqn: Annotated[str, Shown("Name of the entry; nested keys are joined by dots.")]
    kind: Annotated[str, OneOf(EntryKind), Shown("object: a value other than a tensor.")]
    dtype: Annotated[str | None, Shown("null: a value other than a tensor.")]
    shape: Annotated[tuple[int, ...] | None, Shown("null: a value other than a tensor.")]
    bytes: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Sums of all entries below one name; ``entry`` if the name itself is an entry."""

    name: Annotated[str, Shown("Prefix of the names below this node.")]
    tensors: Annotated[int, Shown("Number of tensors below.")]
    objects: Annotated[int, Shown("Number of other values below.")]
    bytes: Annotated[int, Shown("Size of all entries below.")]
    entry: Annotated[Tensor | None, Shown("Set if the name itself is a tensor or a value.")] = None

    @property
    def is_optimizer(self) -> bool:
        """True if the name belongs to an optimizer."""
        return is_of_optimizer(self.name)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype and shape of a tensor on one side of a comparison."""

    dtype: str
    shape: tuple[int, ...]


_DRAFT_TENSORS: Final = 2_000
_DRAFT_ROWS: Final = 2_000
"""Rows of one transaction, which takes hundredths of a second."""
_MAX_PATTERNS: Final = 5_000
"""Maximum patterns of one structure, written in one transaction; the search ignores further ones."""


@dataclass(frozen=True, slots=True)
class StructureFacts:
    """The structure of a checkpoint, made by `of`. ``tensors`` are sorted by name."""

    digest: str
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> StructureFacts:
        """Return the structure with its digest: SHA-256 of names, kinds, dtypes and shapes, without sizes of
        objects."""
        ordered = tuple(sorted(tensors, key=lambda tensor: tensor.fqn))
        digest = hashlib.sha256(b"dcp structure 1\0")
        for tensor in ordered:
            name = tensor.fqn.encode(errors="surrogatepass")
            shape = None if tensor.shape is None else [str(length) for length in tensor.shape]
            digest.update(msgpack.packb([name, tensor.kind, tensor.dtype, shape]))
        return cls(digest.hexdigest(), ordered)


def ensure_structures(connection: Connection, facts: Sequence[StructureFacts]) -> dict[str, int]:
    """Return the ids of structures by digest, writing missing ones."""
    wanted = {one.digest: one for one in facts}
    known = _ids(connection, wanted)
    for digest in sorted(wanted.keys() - known.keys()):
        known[digest] = _write(connection, wanted[digest])
    return known


def prepare_structures(
    database: Database, facts: Iterable[StructureFacts | None], *, clock: Callable[[], float] = time.time
) -> None:
    """Write large missing structures in advance for `ensure_structures`."""
    large = {one.digest: one for one in facts if one is not None and len(one.tensors) > _DRAFT_TENSORS}
    if not large:
        return
    with database.read() as connection:
        known = _ids(connection, large)
    for digest in sorted(large.keys() - known.keys()):
        _prepare(database, large[digest], clock())


def _ids(connection: Connection, digests: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    wanted = sorted(digests)
    for start in range(0, len(wanted), 500):
        query = select(structures.c.digest, structures.c.id).where(
            structures.c.digest.in_(wanted[start : start + 500])
        )
        found |= {row.digest: row.id for row in connection.execute(query)}
    return found


def _write(connection: Connection, facts: StructureFacts) -> int:
    columns = _columns(facts)
    statement = dialect_insert(connection, structures).on_conflict_do_nothing().returning(structures.c.id)
    number = connection.execute(statement, columns).scalar()
    if number is None:  # another process wrote the structure while this one waited
        return _ids(connection, [facts.digest])[facts.digest]
    if facts.tensors:
        connection.execute(insert(structure_tensors), _tensor_rows(number, _as_counted(facts)))
    _write_names(connection, number, facts, columns["dtypes"])
    return int(number)


def _prepare(database: Database, facts: StructureFacts, now: float) -> None:
    columns = _columns(facts)
    number = STRUCTURES.begin(database, columns, now)
    tensors = _as_counted(facts)
    starts = range(0, len(tensors), _DRAFT_ROWS)
    STRUCTURES.write(
        database,
        (_tensor_rows(number, tensors[begin : begin + _DRAFT_ROWS], begin) for begin in starts),
    )
    publish = partial(_publish, number=number, facts=facts, dtypes=columns["dtypes"])
    if not database.transact(publish):
        STRUCTURES.remove(database, number)


def _as_counted(facts: StructureFacts) -> list[Tensor]:
    """Sort naturally, layer 2 before layer 10, and keep the positions."""
    return sorted(facts.tensors, key=lambda tensor: in_order(tensor.fqn))


def _publish(connection: Connection, number: int, facts: StructureFacts, dtypes: Mapping[str, int]) -> bool:
    """Turn the draft into the structure; return False if another process was faster."""
    if _ids(connection, [facts.digest]):
        return False
    try:
        with connection.begin_nested():
            named = update(structures).where(structures.c.id == number).values(digest=facts.digest)
            connection.execute(named)
    except IntegrityError:  # inserted concurrently
        return False
    _write_names(connection, number, facts, dtypes)
    return True


def _columns(facts: StructureFacts) -> dict[str, Any]:
    tensors = [tensor for tensor in facts.tensors if tensor.kind == "tensor"]
    dtypes: dict[str, int] = {}
    for tensor in tensors:
        dtype = clean_text(tensor.dtype or "unknown")[:32]
        dtypes[dtype] = clean_integer(dtypes.get(dtype, 0) + tensor.bytes)
    return {
        "digest": facts.digest,
        "tensor_count": len(tensors),
        "object_count": len(facts.tensors) - len(tensors),
        "element_count": clean_integer(sum(math.prod(tensor.shape or ()) for tensor in tensors)),
        "bytes": clean_integer(sum(tensor.bytes for tensor in facts.tensors)),
        "dtypes": dtypes,
    }


def _tensor_rows(structure_id: int, tensors: Sequence[Tensor], first: int = 0) -> list[dict[str, object]]:
    return [
        {
            "structure_id": structure_id,
            "position": position,
            "fqn": short_name(tensor.fqn),
            "kind": tensor.kind,
            "dtype": None if tensor.dtype is None else clean_text(tensor.dtype)[:32],
            "shape": None if tensor.shape is None else [clean_integer(length) for length in tensor.shape],
            "bytes": clean_integer(tensor.bytes),
        }
        for position, tensor in enumerate(tensors, first)
    ]


def _write_names(
    connection: Connection, structure_id: int, facts: StructureFacts, dtypes: Iterable[str]
) -> None:
    """Write the dtypes, and the name patterns with the first tensor of each, in order."""
    rows: list[dict[str, Any]] = [{"structure_id": structure_id, "dtype": one} for one in sorted(dtypes)]
    insert_missing(connection, structure_dtypes, rows)
    found: dict[str, list[int]] = {}
    for position, tensor in enumerate(facts.tensors):
        pattern = pattern_of(short_name(tensor.fqn))
        if pattern in found:
            found[pattern][1] += 1
        elif len(found) < _MAX_PATTERNS:
            found[pattern] = [position, 1]
    if not found:
        return
    insert_missing(connection, tensor_patterns, [{"pattern": pattern} for pattern in sorted(found)])
    rows = [
        {"structure_id": structure_id, "pattern": pattern, "position": position, "tensor_count": count}
        for pattern, (position, count) in found.items()
    ]
    connection.execute(insert(structure_patterns), rows)


_COUNTED: Final = 2000
"""Maximum names of one tree level in natural order; more would slow down each page."""


_PARTS: Final = 12
_LONG_NAME: Final = 80
"""Longer names cannot be a model, an optimizer or a glob."""


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
    """Return a page of entries whose names match ``glob``, optionally of one kind and dtype.

    Raises `InvalidQueryError` for an invalid glob or cursor.
    """
    table = structure_tensors.c
    mark = query_mark("tensors", structure_id, glob, kind, dtype)
    query = select(structure_tensors).where(table.structure_id == structure_id)
    if glob is not None:
        query = query.where(matches(connection, table.fqn, check_pattern("glob", glob)))
    if kind is not None:
        query = query.where(table.kind == kind)
    if dtype is not None:
        query = query.where(table.dtype == dtype)
    key = (table.position, int)
    return read_page(connection, query, _entry, mark, key, cursor=cursor, limit=limit)


def tree_level(
    connection: Connection,
    structure_id: int,
    prefix: str,
    *,
    limit: int,
    cursor: str | None = None,
    is_collapsed: bool = False,
) -> Page[TreeNode]:
    """Return the names directly below ``prefix``, a name without its last dot; "" is the top.

    ``is_collapsed`` joins a name with its single child, as in ``model.decoder``. Raises `InvalidQueryError`
    for an invalid cursor.
    """
    table = structure_tensors.c
    start = f"{prefix}." if prefix else ""
    mark = query_mark("tree", structure_id, prefix)
    rest = func.substr(table.fqn, len(start) + 1)
    is_postgres = connection.dialect.name == "postgresql"
    dot = (func.strpos if is_postgres else func.instr)(rest, ".")
    name: ColumnElement[Any] = case((dot > 0, func.substr(rest, 1, dot - 1)), else_=rest)
    if is_postgres:  # as on SQLite, independent of the locale of the server
        name = name.collate("C")
    is_tensor = case((table.kind == "tensor", 1), else_=0)
    query = select(
        name.label("name"),
        func.sum(is_tensor).label("tensors"),
        func.count().label("entries"),
        func.sum(table.bytes).label("bytes"),
        func.min(table.fqn).label("first"),
        func.max(table.fqn).label("last"),
    ).where(table.structure_id == structure_id)
    if start:
        query = query.where(func.substr(table.fqn, 1, len(start)) == start)
    last = None if cursor is None else decode_cursor(cursor, mark, str)[0]
    rows = _ordered(connection, query.group_by(name).order_by(name), name, last, limit + 1)
    shown = rows[:limit]
    names = [
        _common(row.first, row.last)[len(start) :] or row.name if is_collapsed else row.name for row in shown
    ]
    own = _entries(connection, structure_id, [f"{start}{name}" for name in names])
    nodes = tuple(
        TreeNode(
            name,
            int(row.tensors),
            int(row.entries) - int(row.tensors),
            int(row.bytes),
            own.get(f"{start}{name}"),
        )
        for row, name in zip(shown, names, strict=True)
    )
    return Page(nodes, encode_cursor(mark, shown[-1].name) if len(rows) > limit else None)


def tree_levels(connection: Connection, structure_id: int, prefix: str, most: int) -> list[str]:
    """Return ``prefix`` and the last ``most`` prefixes above it, without those with a single child."""
    parts = prefix.split(".") if prefix else []
    levels = [".".join(parts[:end]) for end in range(1, len(parts) + 1)][-2 * most :]
    if not levels:
        return []
    fqn = structure_tensors.c.fqn
    columns = []
    for level in levels[:-1]:
        below = case((func.substr(fqn, 1, len(level) + 1) == f"{level}.", fqn))
        columns += [func.min(below), func.max(below)]
    query = select(*columns).where(structure_tensors.c.structure_id == structure_id)
    ends = [*connection.execute(query).one()] if columns else []
    found = [
        level
        for level, first, last in zip(levels[:-1], ends[::2], ends[1::2], strict=True)
        if first is None or not _common(first, last).startswith(f"{level}.")
    ]
    return [*found, levels[-1]][-most:]


def _common(first: str, last: str) -> str:
    """Return the common parent of all names from ``first`` to ``last`` by code point; "" without one."""
    if first == last:
        return first
    differ = (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(differ, min(len(first), len(last)))].rpartition(".")[0]


def parts_of(connection: Connection, structure_id: int | None) -> list[TreeNode]:
    """Return the parts of a checkpoint, such as model and optimizer; empty if there are many.

    Parts are the top of the tree, and the children of a name that contains an optimizer.
    """
    if structure_id is None:
        return []
    top = _parts_below(connection, structure_id, "")
    if any(one.is_optimizer for one in top):
        return top
    parts: list[TreeNode] = []
    for one in top:
        inner = _parts_below(connection, structure_id, one.name)
        parts += inner if any(each.is_optimizer for each in inner) else [one]
    return parts


def _parts_below(connection: Connection, structure_id: int, prefix: str) -> list[TreeNode]:
    nodes = tree_level(connection, structure_id, prefix, limit=_PARTS + 1).items
    start = f"{prefix}." if prefix else ""
    return [
        replace(one, name=f"{start}{one.name}")
        for one in (nodes if len(nodes) <= _PARTS else ())
        if one.tensors and one.entry is None and len(one.name) < _LONG_NAME
    ]


def _ordered(
    connection: Connection, query: Select[Any], name: ColumnElement[Any], last: str | None, limit: int
) -> Sequence[Row[Any]]:
    """Return the rows after the name ``last`` in natural order; by code point for very many names."""
    rows = connection.execute(query.limit(_COUNTED + 1)).all()
    if len(rows) > _COUNTED and last is None:
        return rows[:limit]
    if len(rows) > _COUNTED:
        return connection.execute(query.where(name > literal(last)).limit(limit)).all()
    found = sorted((in_order(row.name), row.name, row) for row in rows)
    behind = (row for order, name, row in found if last is None or (order, name) > (in_order(last), last))
    return list(islice(behind, limit))


def _entries(connection: Connection, structure_id: int, names: Sequence[str]) -> dict[str, Tensor]:
    table = structure_tensors.c
    if not names:
        return {}
    query = select(structure_tensors).where(table.fqn.in_(names), table.structure_id == structure_id)
    return {row.fqn: _entry(row) for row in connection.execute(query)}


_entry: Final = partial(record_of_row, Tensor)
