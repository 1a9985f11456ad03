"""Parts of a save that get files of their own (``apart=``), so that they can be dropped without rewriting."""

from __future__ import annotations

from typing import Any

import numpy as np

from dcp.planners.load.selection import Selection
from dcp.planners.rank_state import RankState
from dcp.saving.feature import SaveFeature
from dcp.storage.geometry.strides import Int64


class Parts(SaveFeature):
    """Numbers the tensors of each part from 1; 0 for those of none."""

    name = "parts"
    option = "apart"

    def agreed(self) -> dict[str, Any]:
        """Return the patterns: a part of one rank's files alone cannot be dropped."""
        return {"apart": [list(patterns) for patterns in self.options.apart]}

    def groups(self, local: RankState) -> Int64:
        """Return by local tensor the number of its part."""
        columns = local.columns
        selections = [Selection.of(patterns, None) for patterns in self.options.apart]
        numbers = np.array(
            [
                next((at for at, one in enumerate(selections, 1) if one is not None and one.selects(name)), 0)
                for name in columns.fqns
            ],
            np.int64,
        )
        found = np.zeros(len(local.memory.tensors), np.int64)
        found[columns.item_sources] = numbers[columns.item_tensors]
        return found
