"""Contents of benchmark tensors: a function of the global position, so that any sharding can be checked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["fill", "is_intact"]

_UNSIGNED = {2: np.uint16, 4: np.uint32}
_ROW_STEP, _COLUMN_STEP, _SEED_STEP = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_BLOCK_BYTES = 4 << 20


def _matrix(tensor: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    rows = tensor.shape[0] if tensor.dim() > 1 else 1
    unsigned = {2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    matrix: npt.NDArray[np.unsignedinteger] = tensor.detach().reshape(-1).view(unsigned).numpy()
    return matrix.reshape(rows, -1)


def _expected(
    shape: tuple[int, int], dtype: type[np.unsignedinteger], seed: int, row: int, column: int
) -> npt.NDArray[np.unsignedinteger]:
    rows = np.arange(row, row + shape[0], dtype=np.uint64) * _ROW_STEP + seed * _SEED_STEP
    columns = np.arange(column, column + shape[1], dtype=np.uint64) * _COLUMN_STEP
    return np.add(rows.astype(dtype)[:, None], columns.astype(dtype)[None, :], dtype=dtype)


def _blocks(tensor: torch.Tensor) -> list[tuple[int, int]]:
    rows = tensor.shape[0] if tensor.dim() > 1 else 1
    step = max(1, _BLOCK_BYTES * rows // max(tensor.nbytes, 1))
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def fill(tensor: torch.Tensor, seed: int, offsets: tuple[int, ...]) -> None:
    """Fill a contiguous 1-D or 2-D local tensor at ``offsets`` of the global tensor."""
    matrix, row, column = _matrix(tensor), offsets[0] if len(offsets) > 1 else 0, offsets[-1]
    for begin, end in _blocks(tensor):
        part = matrix[begin:end]
        part[...] = _expected((end - begin, matrix.shape[1]), matrix.dtype.type, seed, row + begin, column)


def is_intact(tensor: torch.Tensor, seed: int, offsets: tuple[int, ...]) -> bool:
    """Return True if every byte equals the byte written by `fill`."""
    matrix, row, column = _matrix(tensor), offsets[0] if len(offsets) > 1 else 0, offsets[-1]
    return all(
        np.array_equal(
            matrix[begin:end],
            _expected((end - begin, matrix.shape[1]), matrix.dtype.type, seed, row + begin, column),
        )
        for begin, end in _blocks(tensor)
    )
