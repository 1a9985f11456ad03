"""Release 0.2.0: retention policies name their maker.

Unreleased versions changed tables without a revision of their own. `dcp.server.database.migrations.upgrade`
compares the columns afterwards and refuses databases of such versions.

Revision ID: 0.2.0
Revises: 0.1.0
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, String, inspect

revision = "0.2.0"
down_revision = "0.1.0"


def upgrade() -> None:
    """Add the column to the tables of 0.1.0. Policies without a maker stay enabled."""
    columns = [one["name"] for one in inspect(op.get_bind()).get_columns("retention_policies")]
    if "maker" not in columns:
        op.add_column("retention_policies", Column("maker", String(256)))
