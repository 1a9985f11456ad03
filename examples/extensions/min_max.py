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
from dcp.storage.engine.write import Observer, WriteColumns
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.tensors import torch_dtype


class MinMax(SaveFeature):
    """Looks at the bytes that are written, each rank at its own, and joins what the ranks found."""

    name = "min_max"

    def observer(self, local: RankState, columns: WriteColumns) -> Observer:
        """Looks at the rows that this rank writes: boxes of its local tensors ``columns.sources``."""
        return _Extremes(local.memory.dtype_codes[columns.sources].tolist(), columns.shares.tolist())

    def manifest(self, index: CheckpointIndex, rows: np.ndarray, found: Sequence[Any]) -> CheckpointIndex:
        """By tensor, over all chunks of all ranks; nothing for those without elements."""
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
        """Whole elements, at most 1 MiB of them; of complex ones both parts."""
        values = torch.frombuffer(bytearray(data), dtype=torch_dtype(self._codes[row]))
        values = (torch.view_as_real(values) if values.is_complex() else values).double()
        self._found[row] = _joined(self._found[row], (float(values.min()), float(values.max())))

    def finish(self) -> list[tuple[float, float] | None]:
        """By row; a tied tensor's, which shares another row, is that one's."""
        return [self._found[row if share < 0 else share] for row, share in enumerate(self._shares)]


def _joined(one: tuple[float, float] | None, other: tuple[float, float]) -> tuple[float, float]:
    """The extremes of both; NaN where either has it."""
    return (
        other if one is None else (float(np.minimum(one[0], other[0])), float(np.maximum(one[1], other[1])))
    )
