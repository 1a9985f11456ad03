"""What a job waits for, and until when.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import JSON, Column
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"

JSON_ = JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """One column."""
    op.add_column("jobs", Column("waiting", JSON_))
