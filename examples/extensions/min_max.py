"""A feature in one file: the least and the greatest value of each tensor, in the manifest of each save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from dcp.planners.rank_state import RankState
from dcp.saving.feature import SaveFeature
from dcp.storage.engine.observers import Observer
from dcp.storage.engine.write_tables import WriteColumns
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.tensors import torch_dtype


class MinMax(SaveFeature):
    """Looks at the bytes that are written, each rank at its own, and joins what the ranks found."""

    name = "min_max"

    def observer(self, local: RankState, columns: WriteColumns) -> Observer:
        """Looks at the rows that this rank writes."""
        return _Extremes(local.memory.dtype_codes[columns.sources].tolist(), columns.shares.tolist())

    def manifest(self, index: CheckpointIndex, rows: np.ndarray, found: Sequence[Any]) -> CheckpointIndex:
        """By tensor, over all chunks of all ranks."""
        extremes: dict[str, tuple[float, float]] = {}
        for tensor, (low, high) in zip(index.chunk_tensors[rows].tolist(), chain(*found), strict=True):
            known = extremes.get(index.fqns[tensor], (low, high))
            extremes[index.fqns[tensor]] = min(known[0], low), max(known[1], high)
        return replace(index, provenance={**index.provenance, self.name: extremes})


class _Extremes(Observer):
    def __init__(self, dtype_codes: list[int], shares: list[int]) -> None:
        self._codes, self._shares = dtype_codes, shares
        self._found = [(float("inf"), float("-inf"))] * len(dtype_codes)

    def see(self, row: int, position: int, data: memoryview) -> None:
        """Whole elements, at most 1 MiB of them."""
        values = torch.frombuffer(bytearray(data), dtype=torch_dtype(self._codes[row]))
        low, high = self._found[row]
        self._found[row] = min(low, float(values.min())), max(high, float(values.max()))

    def finish(self) -> list[tuple[float, float]]:
        """By row; a tied tensor's is that of the row that was written for it."""
        return [self._found[row if share < 0 else share] for row, share in enumerate(self._shares)]
