"""The boxes of a rank's columns as views of its local tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dcp.planners.columns import SaveColumns
from dcp.storage.formats.index import Int64

__all__ = ["item_views"]


def item_views(columns: SaveColumns, sources: Sequence[torch.Tensor], rows: Int64) -> list[torch.Tensor]:
    """The box of each of ``rows``: its source itself where that has no other box."""
    numbers = columns.item_sources[rows]
    if len(rows) == len(sources) == len(columns.item_sources) and np.array_equal(
        numbers, np.arange(len(rows))
    ):
        return list(sources)
    alone = np.bincount(columns.item_sources, minlength=len(sources))[numbers] == 1
    views = [sources[number] for number in numbers.tolist()]
    for position in np.flatnonzero(~alone).tolist():
        views[position] = _box_view(columns, views[position], int(rows[position]))
    return views


def _box_view(columns: SaveColumns, source: torch.Tensor, row: int) -> torch.Tensor:
    begin = int(columns.box_start[row])
    for dim in range(source.ndim):
        place = int(columns.item_local_offsets[begin + dim])
        source = source.narrow(dim, place, int(columns.item_sizes[begin + dim]))
    return source
