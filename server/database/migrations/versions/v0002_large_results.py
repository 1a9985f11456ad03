"""Large results of jobs and statistics of tensors lie in tables of their own, so that a list reads a list.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from typing import Any

from alembic import op
from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    ForeignKeyConstraint,
    Integer,
    PrimaryKeyConstraint,
    Text,
    cast,
    column,
    func,
    insert,
    select,
    table,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"

ID = BigInteger().with_variant(Integer(), "sqlite")
JSON_ = JSON().with_variant(JSONB(), "postgresql")
MAX_CHARACTERS = 2048
PART = 100

JOBS = table("jobs", column("id", ID), column("result", JSON_))
RESULTS = table("job_results", column("job_id", ID), column("result", JSON_))
STATISTICS = table("checkpoint_statistics", column("checkpoint_id", ID), column("result", JSON_))
PARTS = table(
    "checkpoint_statistics_parts",
    column("checkpoint_id", ID),
    column("position", Integer),
    column("tensors", JSON_),
)


def upgrade() -> None:
    """The tables, and what belongs into them."""
    op.create_table(
        "job_results",
        Column("job_id", ID, nullable=False),
        Column("result", JSON_, nullable=False),
        ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_results_job_id"),
        PrimaryKeyConstraint("job_id", name="pk_job_results"),
    )
    op.create_table(
        "checkpoint_statistics_parts",
        Column("checkpoint_id", ID, nullable=False),
        Column("position", Integer, nullable=False),
        Column("tensors", JSON_, nullable=False),
        ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name="fk_checkpoint_statistics_parts_checkpoint_id"
        ),
        PrimaryKeyConstraint("checkpoint_id", "position", name="pk_checkpoint_statistics_parts"),
    )
    connection = op.get_bind()
    _move_results(connection)
    _move_statistics(connection)


def _move_results(connection: Connection) -> None:
    size = func.length(cast(JOBS.c.result, Text))
    for job_id in connection.execute(select(JOBS.c.id).where(size > MAX_CHARACTERS)).scalars().all():
        result = _document(connection, JOBS.c.result, JOBS.c.id == job_id)
        connection.execute(insert(RESULTS).values(job_id=job_id, result=result))
        short = {name: value for name, value in result.items() if isinstance(value, int | float | None)}
        connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(result=short))


def _move_statistics(connection: Connection) -> None:
    key = STATISTICS.c.checkpoint_id
    for number in connection.execute(select(key)).scalars().all():
        result = _document(connection, STATISTICS.c.result, key == number)
        tensors = result.pop("tensors", [])
        rows = [
            {"checkpoint_id": number, "position": position, "tensors": tensors[position : position + PART]}
            for position in range(0, len(tensors), PART)
        ]
        if rows:
            connection.execute(insert(PARTS), rows)
        result["tensor_count"] = len(tensors)
        connection.execute(update(STATISTICS).where(key == number).values(result=result))


def _document(connection: Connection, what: Any, where: Any) -> dict[str, Any]:
    return dict(connection.execute(select(what).where(where)).scalar_one())
