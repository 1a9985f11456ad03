"""Documents in JSON keep the order of their members: rules of ``rename`` apply in theirs.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import JSON

revision = "0011"
down_revision = "0010"

DOCUMENTS = {
    "api_keys": ("scopes", "roots"),
    "audit": ("detail",),
    "automation_rules": ("condition", "actions"),
    "checkpoint_statistics": ("result",),
    "checkpoints": ("user_metadata", "provenance"),
    "document_parts": ("content",),
    "documents": ("head",),
    "events": ("data",),
    "idempotency_keys": ("headers",),
    "job_events": ("data",),
    "jobs": ("params", "plan", "progress", "result", "error", "waiting"),
    "retention_policies": ("keep",),
    "roots": ("scan_state",),
    "structure_tensors": ("shape",),
    "structures": ("dtypes",),
    "tasks": ("payload", "result", "error"),
    "verifications": ("findings",),
    "webhooks": ("events", "roots"),
}


def upgrade() -> None:
    """JSON in place of JSONB in PostgreSQL; SQLite has had the text all the time."""
    if op.get_bind().dialect.name == "postgresql":
        for table, columns in DOCUMENTS.items():
            for name in columns:
                op.alter_column(table, name, type_=JSON(), postgresql_using=f"{name}::json")
