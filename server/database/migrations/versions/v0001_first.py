"""The tables of 0.1.0.

An empty database gets the newest tables at once (`dcp.server.database.migrations.upgrade`), so this first
step has nothing to do: later ones begin from it.

Revision ID: 0.1.0
Revises:
"""

from __future__ import annotations

revision = "0.1.0"
down_revision = None


def upgrade() -> None:
    """Do nothing."""
