"""A save feature: store the minimum and maximum of each tensor in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from dcp.planners.rank_state import RankState
from dcp.saving.feature import SaveFeature
from dcp.storage.engine.write import Observer, WriteColumns
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.tensors import torch_dtype


class MinMax(SaveFeature):
    """Observe the bytes that each rank writes, and merge the results of all ranks."""

    name = "min_max"

    def observer(self, local: RankState, columns: WriteColumns) -> Observer:
        """Observe the rows of this rank: ``columns.sources`` are the numbers of its local tensors."""
        return _Extremes(local.memory.dtype_codes[columns.sources].tolist(), columns.shares.tolist())

    def manifest(self, index: CheckpointIndex, rows: np.ndarray, found: Sequence[Any]) -> CheckpointIndex:
        """Merge the extremes of all chunks of each tensor; skip tensors without elements."""
        extremes: dict[str, tuple[float, float]] = {}
        for tensor, own in zip(index.chunk_tensors[rows].tolist(), chain(*found), strict=True):
            if own is not None:
                extremes[index.fqns[tensor]] = _joined(extremes.get(index.fqns[tensor]), own)
        return replace(index, provenance={**index.provenance, self.name: extremes})


class _Extremes(Observer):
    def __init__(self, dtype_codes: list[int], shares: list[int]) -> None:
        self._codes, self._shares = dtype_codes, shares
        self._found: list[tuple[float, float] | None] = [None] * len(dtype_codes)

    def see(self, row: int, position: int, data: memoryview) -> None:
        """Update the extremes of ``row``; for complex tensors use real and imaginary parts."""
        values = torch.frombuffer(bytearray(data), dtype=torch_dtype(self._codes[row]))
        values = (torch.view_as_real(values) if values.is_complex() else values).double()
        self._found[row] = _joined(self._found[row], (float(values.min()), float(values.max())))

    def finish(self) -> list[tuple[float, float] | None]:
        """Return the extremes of each row; a tied tensor shares the row of another tensor."""
        return [self._found[row if share < 0 else share] for row, share in enumerate(self._shares)]


def _joined(one: tuple[float, float] | None, other: tuple[float, float]) -> tuple[float, float]:
    """Merge two pairs of extremes; NaN wins."""
    return (
        other if one is None else (float(np.minimum(one[0], other[0])), float(np.maximum(one[1], other[1])))
    )
