"""What parts of checkpoints take, by the names of their tensors; nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, case, func, or_, select

from dcp.manager.retention import Part
from dcp.server.catalog.names import check_pattern, matches
from dcp.server.database.tables import jobs, structure_tensors
from dcp.server.records.jobs import FINAL_STATES

__all__ = ["PartBytes", "bytes_of_parts", "dropped_patterns", "in_use", "part_bytes"]


class PartBytes(NamedTuple):
    """The bytes of one structure: how many tensors match, their bytes, and those of all tensors."""

    tensors: int
    bytes: int
    total_bytes: int


def part_bytes(
    connection: Connection, structures: Iterable[int], only: Sequence[str]
) -> dict[int, PartBytes]:
    """The bytes of tensors whose names match one of the globs ``only``, by structure."""
    table = structure_tensors.c
    globs = [matches(connection, table.fqn, check_pattern("only", glob)) for glob in only]
    is_one = case((or_(*globs), 1), else_=0)
    found = {}
    for number in structures:
        query = select(func.sum(is_one), func.sum(is_one * table.bytes), func.sum(table.bytes))
        row = connection.execute(query.where(table.structure_id == number, table.kind == "tensor")).one()
        found[number] = PartBytes(int(row[0] or 0), int(row[1] or 0), int(row[2] or 0))
    return found


def bytes_of_parts(
    connection: Connection, structures: Iterable[int], parts: Sequence[Part]
) -> dict[str, dict[int, PartBytes]]:
    """Bytes by the part's name and by structure; a pattern also matches what is below a name that it
    matches."""
    numbers = sorted(set(structures))
    return {
        part.name: part_bytes(
            connection, numbers, [glob for one in part.patterns for glob in (one, f"{one}.*")]
        )
        for part in parts
    }


def dropped_patterns(provenance: Any) -> frozenset[str]:
    """What was dropped from a checkpoint, as the catalog has its provenance."""
    parts = provenance.get("dropped") if isinstance(provenance, Mapping) else None
    notes = parts if isinstance(parts, list) else []
    lists = (note.get("patterns") for note in notes if isinstance(note, Mapping))
    return frozenset(str(glob) for globs in lists if isinstance(globs, list) for glob in globs)


def in_use(connection: Connection, checkpoint_ids: Sequence[int]) -> set[int]:
    """Those of the checkpoints that a job which has not ended is about: it may be reading them."""
    query = select(jobs.c.checkpoint_id).where(
        jobs.c.checkpoint_id.in_(checkpoint_ids), jobs.c.state.not_in(FINAL_STATES)
    )
    return {int(number) for number in connection.execute(query).scalars()}
