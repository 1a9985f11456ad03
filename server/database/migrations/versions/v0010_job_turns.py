"""The order of queued jobs, in which all who submit jobs get a fair share, and counts of checkpoints.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add a column and three indexes: the next job, the jobs of one key, the counts of checkpoints."""
    op.add_column("jobs", Column("turn", BigInteger, server_default="0", nullable=False))
    op.drop_index("ix_jobs_state_priority_id", "jobs")
    op.create_index("ix_jobs_state_priority_turn_id", "jobs", ["state", "priority", "turn", "id"])
    op.create_index("ix_jobs_created_by_state_turn", "jobs", ["created_by", "state", "turn"])
    counted = ["state", "verification", "format", "is_pinned", "root_id", "run_id", "structure_id"]
    op.create_index("ix_checkpoints_counted", "checkpoints", counted)
