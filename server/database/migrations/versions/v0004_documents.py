"""Large results of tasks and jobs, and tensors of statistics, lie in documents: each once, in parts.

Revision ID: 0004
Revises: 0003
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
    String,
    Text,
    UniqueConstraint,
    cast,
    column,
    func,
    insert,
    null,
    select,
    table,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"

ID = BigInteger().with_variant(Integer(), "sqlite")
JSON_ = JSON().with_variant(JSONB(), "postgresql")
NAME = Text().with_variant(Text(collation="C"), "postgresql")
MAX_CHARACTERS = 2048
ITEMS = 100
CHARACTERS = 1 << 16

JOBS = table("jobs", column("id", ID), column("document_id", ID))
RESULTS = table("job_results", column("job_id", ID), column("result", JSON_))
TASKS = table("tasks", column("id", ID), column("result", JSON_), column("document_id", ID))
STATISTICS = table(
    "checkpoint_statistics",
    column("checkpoint_id", ID),
    column("result", JSON_),
    column("job_id", ID),
    column("document_id", ID),
)
STATISTICS_PARTS = table(
    "checkpoint_statistics_parts",
    column("checkpoint_id", ID),
    column("position", Integer),
    column("tensors", JSON_),
)
DOCUMENTS = table("documents", column("id", ID), column("head", JSON_))
PARTS = table(
    "document_parts",
    column("document_id", ID),
    column("field", NAME),
    column("position", Integer),
    column("content", JSON_),
)


def upgrade() -> None:
    """The tables, and what belongs into them."""
    op.create_table(
        "documents",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("name", String(64)),
        Column("head", JSON_, nullable=False),
        PrimaryKeyConstraint("id", name="pk_documents"),
        UniqueConstraint("name", name="uq_documents_name"),
    )
    op.create_table(
        "document_parts",
        Column("document_id", ID, nullable=False),
        Column("field", NAME, nullable=False),
        Column("position", Integer, nullable=False),
        Column("content", JSON_, nullable=False),
        ForeignKeyConstraint(["document_id"], ["documents.id"], name="fk_document_parts_document_id"),
        PrimaryKeyConstraint("document_id", "field", "position", name="pk_document_parts"),
    )
    for name in ("tasks", "jobs", "checkpoint_statistics"):
        op.add_column(name, Column("document_id", ID))
        op.create_index(f"ix_{name}_document_id", name, ["document_id"])
    connection = op.get_bind()
    _move_results(connection)
    _move_results_of_tasks(connection)
    _move_statistics(connection)
    op.drop_table("job_results")
    op.drop_table("checkpoint_statistics_parts")


def _move_results(connection: Connection) -> None:
    for job_id in connection.execute(select(RESULTS.c.job_id)).scalars().all():
        result = select(RESULTS.c.result).where(RESULTS.c.job_id == job_id)
        number = _write(connection, connection.execute(result).scalar_one())
        connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(document_id=number))


def _move_results_of_tasks(connection: Connection) -> None:
    size = func.length(cast(TASKS.c.result, Text))
    for task_id in connection.execute(select(TASKS.c.id).where(size > MAX_CHARACTERS)).scalars().all():
        result = select(TASKS.c.result).where(TASKS.c.id == task_id)
        number = _write(connection, connection.execute(result).scalar_one())
        moved = {"document_id": number, "result": null()}
        connection.execute(update(TASKS).where(TASKS.c.id == task_id).values(**moved))


def _move_statistics(connection: Connection) -> None:
    for row in connection.execute(select(STATISTICS)).all():
        number = _of_job(connection, row.job_id, row.result["tensor_count"])
        if number is None:
            number = _write(connection, {"tensors": []})
            parts = select(
                cast(number, ID),
                cast("tensors", Text),
                STATISTICS_PARTS.c.position,
                STATISTICS_PARTS.c.tensors,
            ).where(STATISTICS_PARTS.c.checkpoint_id == row.checkpoint_id)
            connection.execute(insert(PARTS).from_select([one.name for one in PARTS.c], parts))
        mine = STATISTICS.c.checkpoint_id == row.checkpoint_id
        connection.execute(update(STATISTICS).where(mine).values(document_id=number))


def _of_job(connection: Connection, job_id: int | None, count: int) -> int | None:
    """The document of the job that computed these statistics, if it has them."""
    number = connection.execute(select(JOBS.c.document_id).where(JOBS.c.id == job_id)).scalar()
    if number is None:
        return None
    tensors = (PARTS.c.document_id == number) & (PARTS.c.field == "tensors")
    last = select(PARTS.c.position, PARTS.c.content).where(tensors).order_by(PARTS.c.position.desc()).limit(1)
    row = connection.execute(last).one_or_none()
    return number if row is not None and row.position + len(row.content) == count else None


def _write(connection: Connection, content: dict[str, Any]) -> int:
    cut = {
        name: CHARACTERS if isinstance(value, str) else ITEMS
        for name, value in content.items()
        if isinstance(value, list) or (isinstance(value, str) and len(value) > CHARACTERS)
    }
    head = {name: type(value)() if name in cut else value for name, value in content.items()}
    statement = insert(DOCUMENTS).values(head=head).returning(DOCUMENTS.c.id)
    number = int(connection.execute(statement).scalar_one())
    for name, step in cut.items():
        for begin in range(0, len(content[name]), step):
            part = {"document_id": number, "field": name, "position": begin}
            connection.execute(insert(PARTS).values(**part, content=content[name][begin : begin + step]))
    return number
