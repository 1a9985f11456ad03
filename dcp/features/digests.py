"""Digests of tensors that a save makes of the bytes on their way (``FileSystemWriter(digests=True)``)."""

from __future__ import annotations

from dcp.planners.rank_state import RankState
from dcp.saving.feature import SaveFeature
from dcp.storage.digests.places import LogicalPlaces
from dcp.storage.engine.write_tables import WriteColumns

__all__ = ["Digests"]


class Digests(SaveFeature):
    """Has the writer add up the bytes that it writes."""

    def places(self, local: RankState, columns: WriteColumns) -> LogicalPlaces | None:
        """The places of the written rows in their tensors."""
        return local.places(columns) if self.writer.digests else None
