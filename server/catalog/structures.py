"""Structures: names, shapes and dtypes, once for all checkpoints that share them.

A large one is written as a draft (`dcp.server.database.drafts`) before the transaction that refers to it, so
that other writers do not wait for hundreds of thousands of rows; it gets its digest with the last of them.

A search looks at patterns of names: in lower case, each number as "#". Layers of a model differ by numbers
only, so that a million names have some hundred patterns.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import msgpack
from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from dcp.server.catalog.names import in_order, pattern_of
from dcp.server.catalog.values import clean_integer, clean_text, short_name
from dcp.server.database.drafts import STRUCTURES
from dcp.server.database.engine import Database
from dcp.server.database.sql import dialect_insert, insert_missing
from dcp.server.database.tables import (
    structure_dtypes,
    structure_patterns,
    structure_tensors,
    structures,
    tensor_patterns,
)

__all__ = ["StructureFacts", "StructureTensor", "ensure_structures", "prepare_structures"]

_DRAFT_TENSORS: Final = 2_000
_DRAFT_ROWS: Final = 2_000
"""In one transaction: hundredths of a second."""
_MAX_PATTERNS: Final = 5_000
"""Of one structure, which are written in one transaction; of stranger ones the first are found."""


@dataclass(frozen=True, slots=True)
class StructureTensor:
    """A tensor, or an object (then without dtype and shape)."""

    fqn: str
    kind: Literal["tensor", "object"]
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class StructureFacts:
    """The structure of a checkpoint; `of` makes one. ``tensors`` are in the order of their names."""

    digest: str
    tensors: tuple[StructureTensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[StructureTensor]) -> StructureFacts:
        """With the digest: SHA-256 over names, kinds, dtypes and shapes. Objects' sizes are no part of it."""
        ordered = tuple(sorted(tensors, key=lambda tensor: tensor.fqn))
        digest = hashlib.sha256(b"dcp structure 1\0")
        for tensor in ordered:
            name = tensor.fqn.encode(errors="surrogatepass")
            shape = None if tensor.shape is None else [str(length) for length in tensor.shape]
            digest.update(msgpack.packb([name, tensor.kind, tensor.dtype, shape]))
        return cls(digest.hexdigest(), ordered)


def ensure_structures(connection: Connection, facts: Sequence[StructureFacts]) -> dict[str, int]:
    """The ids of structures, by digest; missing ones are written."""
    wanted = {one.digest: one for one in facts}
    known = _ids(connection, wanted)
    for digest in sorted(wanted.keys() - known.keys()):
        known[digest] = _write(connection, wanted[digest])
    return known


def prepare_structures(
    database: Database, facts: Iterable[StructureFacts | None], *, clock: Callable[[], float] = time.time
) -> None:
    """Write those that are large and missing, so that `ensure_structures` finds them."""
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
    number = _insert(connection, columns)
    if number is None:  # another process has written it since, and this waited for its end
        return _ids(connection, [facts.digest])[facts.digest]
    if facts.tensors:
        connection.execute(insert(structure_tensors), _tensor_rows(number, _as_counted(facts)))
    _write_patterns(connection, number, facts)
    _insert_dtypes(connection, number, columns["dtypes"])
    return number


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


def _as_counted(facts: StructureFacts) -> list[StructureTensor]:
    """As people count: layer 2 before layer 10. Their places are kept with them."""
    return sorted(facts.tensors, key=lambda tensor: in_order(tensor.fqn))


def _publish(connection: Connection, number: int, facts: StructureFacts, dtypes: Mapping[str, int]) -> bool:
    """The draft is the structure now; False if another one was quicker."""
    if _ids(connection, [facts.digest]):
        return False
    try:
        with connection.begin_nested():
            named = update(structures).where(structures.c.id == number).values(digest=facts.digest)
            connection.execute(named)
    except IntegrityError:  # in this instant
        return False
    _insert_dtypes(connection, number, dtypes)
    _write_patterns(connection, number, facts)
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


def _insert(connection: Connection, columns: Mapping[str, Any]) -> int | None:
    statement = dialect_insert(connection, structures).on_conflict_do_nothing().returning(structures.c.id)
    number = connection.execute(statement, columns).scalar()
    return None if number is None else int(number)


def _insert_dtypes(connection: Connection, number: int, dtypes: Mapping[str, int]) -> None:
    rows = [{"structure_id": number, "dtype": dtype} for dtype in sorted(dtypes)]
    insert_missing(connection, structure_dtypes, rows)


def _tensor_rows(
    structure_id: int, tensors: Sequence[StructureTensor], first: int = 0
) -> list[dict[str, object]]:
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


def _write_patterns(connection: Connection, structure_id: int, facts: StructureFacts) -> None:
    """The patterns of names, each with its first tensor, in the order of names."""
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
    rows: list[dict[str, Any]] = [
        {"structure_id": structure_id, "pattern": pattern, "position": position, "tensor_count": count}
        for pattern, (position, count) in found.items()
    ]
    connection.execute(insert(structure_patterns), rows)
