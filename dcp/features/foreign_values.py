"""Warnings about saved values that need trust, and about keys that become strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp.planners.rank_state import RankState
from dcp.saving.feature import SaveFeature
from dcp.saving.trust_warnings import warn_of_foreign

if TYPE_CHECKING:
    from dcp.saving.save import SavingRank


class ForeignValues(SaveFeature):
    """Warn of values that need trust, and of keys that become strings."""

    name = "foreign values"

    def held(self, local: RankState, at: SavingRank) -> RankState:
        """Inspect the types of the coordinator's values."""
        if at.is_coordinator:
            warn_of_foreign(local.columns.objects.fqns, local.objects, local.foreign_keys)
        return local
