"""For pages that helper D replaces: deleted when that is merged."""

from __future__ import annotations

from typing import Any

from dcp.server.catalog import details, listing
from dcp.server.catalog.filters import Sort


def get_checkpoint(checkpoint_id: int, database: Any, caller: Any, response: Any) -> Any:
    """One checkpoint."""
    with database.read() as connection:
        return details.get_checkpoint(connection, checkpoint_id, caller.roots)


def list_checkpoints(query: Any, database: Any, caller: Any) -> Any:
    """A page of checkpoints."""
    with database.read() as connection:
        return listing.list_checkpoints(
            connection, query, Sort.parse(query.sort), query.cursor, query.limit, caller.roots
        )
