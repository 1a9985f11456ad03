"""What a checkpoint's training went on from.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, String

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """One column, and the indexes by which the two ends find each other."""
    op.add_column("checkpoints", Column("resumed_from", String(64)))
    for name in ("save_id", "resumed_from"):
        op.create_index(f"ix_checkpoints_{name}", "checkpoints", [name])
