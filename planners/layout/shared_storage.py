"""Boxes with the same bytes at the same place in memory, as tied weights have: one record serves them all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from dcp.planners.rank_state import RankState
from dcp.storage.formats.index import Int64

__all__ = ["item_ties"]


def item_ties(local: RankState) -> Int64:
    """``SaveColumns.item_ties`` of a rank's tensors."""
    columns, sources, pointers = local.columns, local.sources, local.memory.pointers
    ties = np.full(len(columns.item_tensors), -1, np.int64)
    _, inverse, counts = np.unique(pointers, return_inverse=True, return_counts=True)
    shared = (counts[inverse] > 1) & (pointers != 0)
    keys: dict[int, Any] = {}
    for row in np.flatnonzero(shared[columns.item_sources]).tolist():
        source = sources[columns.item_sources[row]]
        box = slice(int(columns.box_start[row]), int(columns.box_start[row + 1]))
        place = (columns.item_sizes[box].tobytes(), columns.item_local_offsets[box].tobytes())
        keys[row] = (source.data_ptr(), source.device, source.dtype, source.shape, source.stride(), place)
    repeated = {key for key, count in Counter(keys.values()).items() if count > 1}
    numbers: dict[Any, int] = {}
    for row, key in keys.items():
        if key in repeated:
            ties[row] = numbers.setdefault(key, len(numbers))
    return ties
