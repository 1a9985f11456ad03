"""Browsers that are signed in with a key.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Float, ForeignKey, Integer, LargeBinary

revision = "0006"
down_revision = "0005"

ID = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """One table."""
    op.create_table(
        "sessions",
        Column("hash", LargeBinary(32), primary_key=True),
        Column("key_id", ID, ForeignKey("api_keys.id"), nullable=False),
        Column("created_seconds", Float, nullable=False),
        Column("expires_seconds", Float, nullable=False, index=True),
    )
