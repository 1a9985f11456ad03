"""Through which weight map a checkpoint was made of another.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, String

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """One column."""
    op.add_column("lineage", Column("map", String(256)))
