"""Parts of a save with separate files (``apart=``), which can be dropped without a rewrite."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp.planners.load.selection import Selection
from dcp.planners.rank_state import RankState
from dcp.saving.feature import SaveFeature
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry.strides import Int64
from dcp.storage.near_names import listed

logger = logging.getLogger(__name__)


class Parts(SaveFeature):
    """Number the tensors of each part from 1; 0 for the rest."""

    name = "parts"
    option = "apart"

    def agreed(self) -> dict[str, Any]:
        """Return the patterns, which must be equal on all ranks."""
        return {"apart": [list(patterns) for patterns in self.options.apart]}

    def groups(self, local: RankState) -> Int64:
        """Return the part number of each local tensor."""
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

    def manifest(self, index: CheckpointIndex, rows: Int64, found: Sequence[Any]) -> CheckpointIndex:
        """Record the parts in the index. Warns of an empty part, except for parts of a manager's rules."""
        for patterns in self.options.apart if self.options.step is None else ():
            selection = Selection.of(patterns, None)
            if selection is not None and not any(map(selection.selects, index.fqns)):
                logger.warning(
                    "apart: no tensor matches %s, so no tensor gets separate files; patterns are shell "
                    "globs on flat keys, such as %r",
                    listed(patterns, most=len(patterns)),
                    next(iter(index.fqns), ""),
                )
        return index
