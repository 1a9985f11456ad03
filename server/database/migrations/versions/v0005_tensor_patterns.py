"""Names of tensors as patterns, with "#" for each number: what a search looks at.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import re
import string

from alembic import op
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    ForeignKeyConstraint,
    Integer,
    PrimaryKeyConstraint,
    Text,
    column,
    insert,
    select,
    table,
)

revision = "0005"
down_revision = "0004"

ID = BigInteger().with_variant(Integer(), "sqlite")
NAME = Text().with_variant(Text(collation="C"), "postgresql")
MAX_PATTERNS = 5_000
SMALL = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)

STRUCTURES = table("structures", column("id", ID), column("digest", Text))
TENSORS = table(
    "structure_tensors", column("structure_id", ID), column("position", Integer), column("fqn", NAME)
)
OF_STRUCTURES = table(
    "structure_patterns",
    column("structure_id", ID),
    column("pattern", NAME),
    column("position", Integer),
    column("tensor_count", Integer),
)
PATTERNS = table("tensor_patterns", column("pattern", NAME))


def upgrade() -> None:
    """The tables, and what belongs into them; drafts get theirs with their name."""
    op.create_table(
        "structure_patterns",
        Column("structure_id", ID, nullable=False),
        Column("pattern", NAME, nullable=False),
        Column("position", Integer, nullable=False),
        Column("tensor_count", Integer, nullable=False),
        ForeignKeyConstraint(["structure_id"], ["structures.id"], name="fk_structure_patterns_structure_id"),
        PrimaryKeyConstraint("structure_id", "pattern", name="pk_structure_patterns"),
    )
    op.create_index(
        "ix_structure_patterns_pattern_structure_id", "structure_patterns", ["pattern", "structure_id"]
    )
    op.create_table(
        "tensor_patterns",
        Column("pattern", NAME, nullable=False),
        PrimaryKeyConstraint("pattern", name="pk_tensor_patterns"),
    )
    connection = op.get_bind()
    known: set[str] = set()
    numbers = select(STRUCTURES.c.id).where(STRUCTURES.c.digest.not_like("draft-%"))
    for number in connection.execute(numbers).scalars().all():
        known |= _write(connection, number)
    if known:
        connection.execute(insert(PATTERNS), [{"pattern": pattern} for pattern in sorted(known)])


def _write(connection: Connection, number: int) -> set[str]:
    names = select(TENSORS.c.position, TENSORS.c.fqn).where(TENSORS.c.structure_id == number)
    found: dict[str, list[int]] = {}
    for position, fqn in connection.execute(names.order_by(TENSORS.c.position)):
        pattern = re.sub("[0-9]+", "#", fqn.translate(SMALL))
        if pattern in found:
            found[pattern][1] += 1
        elif len(found) < MAX_PATTERNS:
            found[pattern] = [position, 1]
    rows = [
        {"structure_id": number, "pattern": pattern, "position": position, "tensor_count": count}
        for pattern, (position, count) in found.items()
    ]
    if rows:
        connection.execute(insert(OF_STRUCTURES), rows)
    return set(found)
