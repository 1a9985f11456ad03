"""Release 0.2.0: the tables of 0.1.0, unchanged.

Unreleased versions changed tables without a revision of their own. `dcp.server.database.migrations.upgrade`
compares the columns afterwards and refuses databases of such versions.

Revision ID: 0.2.0
Revises: 0.1.0
"""

from __future__ import annotations

revision = "0.2.0"
down_revision = "0.1.0"


def upgrade() -> None:
    """Do nothing."""
