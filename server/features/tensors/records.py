"""Records of tensors: levels of the tree of names, and grids of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dcp.server.records.contents import TreeNode
from dcp.server.records.declaring import Shown

__all__ = ["GridValue", "TensorGrid", "TreePage"]

GridValue = Literal["mean", "min", "max", "abs_max", "nonfinite"]


@dataclass(frozen=True, slots=True)
class TreePage:
    """One level of the tree of names, in their order."""

    prefix: str
    items: tuple[TreeNode, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class TensorGrid:
    """A matrix, or a slice that is one, as ``rows`` times ``columns`` cells, row by row.

    Cell (i, j) is of the rows from ``i * shape[0] // rows`` on and the columns from ``j * shape[1] //
    columns`` on. What is not finite counts in ``nonfinite`` alone; a cell without finite values has None.
    """

    fqn: str
    dtype: str
    shape: Annotated[tuple[int, ...], Shown("Of the slice, as a matrix.")]
    rows: int
    columns: int
    is_sampled: Annotated[bool, Shown("Of each cell only a part was read: there is too much of it.")]
    read_elements: int
    mean: tuple[float | None, ...]
    min: tuple[float | None, ...]
    max: tuple[float | None, ...]
    abs_max: tuple[float | None, ...]
    nonfinite: tuple[int, ...]
