"""Documents in JSON keep the order of their members: rules of ``rename`` apply in theirs.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import JSON, inspect
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """JSON in place of JSONB in PostgreSQL; SQLite has had the text all the time."""
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    found = inspect(connection)
    for table in found.get_table_names():
        for column in found.get_columns(table):
            if isinstance(column["type"], JSONB):
                name = column["name"]
                op.alter_column(table, name, type_=JSON(), postgresql_using=f"{name}::json")
