"""One digest for all tensors of a checkpoint.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, String

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """One column, and the index by which those with the same tensors are found."""
    op.add_column("checkpoints", Column("content_digest", String(32)))
    op.create_index("ix_checkpoints_content_digest", "checkpoints", ["content_digest"])
