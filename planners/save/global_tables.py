"""The names of all ranks, in one table.

Ranks mostly have equal tables, which are recognised and taken once, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import SaveColumns
from dcp.planners.value_digests import NOT_COMPARABLE
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import Int64, starts
from dcp.storage.geometry.ragged import gather_rows
from dcp.storage.near_names import listed

__all__ = ["GlobalObjects", "GlobalTensors", "global_objects", "global_tensors", "rank_list"]

_MAX_LISTED_RANKS = 8
_Scalar = TypeVar("_Scalar", bound=np.generic)


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1, 2 and 5 more``."""
    shown = ", ".join(str(rank) for rank in ranks[:_MAX_LISTED_RANKS])
    more = len(ranks) - _MAX_LISTED_RANKS
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, eq=False)
class GlobalTensors:
    """Tensors by first appearance; ``rows[r]`` maps rank r's tensor rows to rows here."""

    fqns: list[str]
    dtype_codes: npt.NDArray[np.uint8]
    requires_grad: npt.NDArray[np.uint8]
    shape_start: Int64
    shape_values: Int64
    rows: list[Int64]
    stride_orders: dict[int, tuple[int, ...]]
    problems: list[str] = field(default_factory=list)

    def shape(self, row: int) -> list[int]:
        """Global shape of a row."""
        shape: list[int] = self.shape_values[self.shape_start[row] : self.shape_start[row + 1]].tolist()
        return shape


class _Table(NamedTuple):
    columns: SaveColumns
    rows: Int64
    new: npt.NDArray[np.bool_]
    ranks: list[int]


def _numbered(fqns: Sequence[str], position: dict[str, int]) -> Int64:
    """The number of each name, in the order in which they come; ``position`` is all of them."""
    if not position:
        position.update(zip(fqns, range(len(fqns)), strict=True))
        if len(position) == len(fqns):
            return np.arange(len(fqns), dtype=np.int64)
        position.clear()
    return np.array([position.setdefault(fqn, len(position)) for fqn in fqns], np.int64)


def _tables(all_columns: Sequence[SaveColumns], position: dict[str, int]) -> list[_Table]:
    tables: dict[tuple[object, ...], _Table] = {}
    for rank, columns in enumerate(all_columns):
        key = (
            tuple(columns.fqns),
            columns.dtype_codes.tobytes(),
            columns.shape_start.tobytes(),
            columns.shape_values.tobytes(),
        )
        table = tables.get(key)
        if table is None:
            known = len(position)
            rows = _numbered(columns.fqns, position)
            table = tables[key] = _Table(columns, rows, rows >= known, [])
        table.ranks.append(rank)
    return list(tables.values())


def global_tensors(all_columns: Sequence[SaveColumns]) -> GlobalTensors:
    """One table of all ranks' tensors; differing dtypes and shapes are listed as problems."""
    position: dict[str, int] = {}
    tables = _tables(all_columns, position)
    ndims = [np.diff(table.columns.shape_start)[table.new] for table in tables]
    shapes = [
        gather_rows(t.columns.shape_values, t.columns.shape_start, np.flatnonzero(t.new)) for t in tables
    ]
    rows_by_rank: dict[int, Int64] = {rank: table.rows for table in tables for rank in table.ranks}
    orders: dict[int, tuple[int, ...]] = {}
    for rank, columns in enumerate(all_columns):
        for row, order in columns.stride_orders.items():
            orders.setdefault(int(rows_by_rank[rank][row]), tuple(order))
    found = GlobalTensors(
        fqns=list(position),
        dtype_codes=_joined([t.columns.dtype_codes[t.new] for t in tables]),
        requires_grad=_joined([t.columns.requires_grad[t.new] for t in tables]),
        shape_start=starts(_joined(ndims)),
        shape_values=_joined(shapes),
        rows=[rows_by_rank[rank] for rank in range(len(all_columns))],
        stride_orders=orders,
    )
    for table in tables:
        _compare(table, found, tables)
    return found


def _joined(parts: Sequence[npt.NDArray[_Scalar]]) -> npt.NDArray[_Scalar]:
    return np.concatenate(parts)


def _compare(table: _Table, found: GlobalTensors, tables: Sequence[_Table]) -> None:
    columns, rows = table.columns, table.rows
    if table.new.all():
        return
    differs = columns.dtype_codes != found.dtype_codes[rows]
    ndims = np.diff(columns.shape_start)
    same_ndim = ndims == np.diff(found.shape_start)[rows]
    differs |= ~same_ndim
    chosen = np.flatnonzero(same_ndim & (ndims > 0))
    if len(chosen):
        mine = gather_rows(columns.shape_values, columns.shape_start, chosen)
        theirs = gather_rows(found.shape_values, found.shape_start, rows[chosen])
        differs[chosen] |= np.logical_or.reduceat(mine != theirs, starts(ndims[chosen])[:-1])
    for local in np.flatnonzero(differs).tolist():
        row = int(rows[local])
        begin, end = columns.shape_start[local], columns.shape_start[local + 1]
        mine_text = _described(int(columns.dtype_codes[local]), columns.shape_values[begin:end].tolist())
        first = next(other.ranks for other in tables if row in other.rows[other.new])
        found.problems.append(
            f"tensor {found.fqns[row]!r} is "
            f"{_described(int(found.dtype_codes[row]), found.shape(row))} on {rank_list(first)}, "
            f"but {mine_text} on {rank_list(table.ranks)}"
        )


def _described(code: int, shape: list[int]) -> str:
    dtype = dtypes.BY_CODE.get(code)
    return f"{dtype.name if dtype else f'dtype {code}'} {shape}"


@dataclass(frozen=True, eq=False)
class GlobalObjects:
    """Objects by first appearance.

    ``owners`` is the lowest rank that has each; ``rows[r]`` maps rank r's object rows to rows here.
    ``mismatches`` describes objects whose known digests differ, or that several ranks have and nobody can
    compare.
    """

    fqns: list[str]
    owners: Int64
    sizes: Int64
    rows: list[Int64]
    mismatches: list[tuple[str, str]] = field(default_factory=list)

    def holders(self, row: int) -> list[int]:
        """All ranks that have an object."""
        return [rank for rank, rows in enumerate(self.rows) if (rows == row).any()]


def global_objects(all_columns: Sequence[SaveColumns], *, check_replicas: bool) -> GlobalObjects:
    """One table of all ranks' objects."""
    position: dict[str, int] = {}
    tables: dict[tuple[str, ...], tuple[Int64, list[int]]] = {}
    rows_by_rank: list[Int64] = []
    for rank, columns in enumerate(all_columns):
        key = tuple(columns.objects.fqns)
        if key not in tables:
            tables[key] = (_numbered(key, position), [])
        tables[key][1].append(rank)
        rows_by_rank.append(tables[key][0])
    count = len(position)
    owners, sizes = np.full(count, len(all_columns), np.int64), np.zeros(count, np.int64)
    digests = np.zeros(count, np.uint64)
    differs, opaque = np.zeros(count, bool), np.zeros(count, bool)
    for rank, (columns, rows) in enumerate(zip(all_columns, rows_by_rank, strict=True)):
        if not len(rows):
            continue
        is_known = owners[rows] < len(all_columns)
        owners[rows] = np.minimum(owners[rows], rank)
        sizes[rows] = np.maximum(sizes[rows], columns.objects.sizes)
        mine, known = columns.objects.digests, digests[rows]
        # A value that cannot be compared is another one than those that can.
        differs[rows] |= is_known & (mine != known)
        opaque[rows] |= is_known & (mine == NOT_COMPARABLE)
        digests[rows] = np.where(known == 0, mine, known)
    found = GlobalObjects(list(position), owners, sizes, rows_by_rank)
    if check_replicas:
        for row in np.flatnonzero(differs).tolist():
            sides = _sides(row, rows_by_rank, [columns.objects.digests for columns in all_columns])
            found.mismatches.append((found.fqns[row], f"object {found.fqns[row]!r} differs: {sides}"))
        for row in np.flatnonzero(opaque & ~differs).tolist():
            fqn, ranks = found.fqns[row], rank_list(found.holders(row))
            why = (
                "pickle gets no state of it, or it contains itself: keep it out of the state dict, "
                "or give what describes it as plain data"
            )
            found.mismatches.append((fqn, f"object {fqn!r} of {ranks} cannot be compared ({why})"))
    return found


def _sides(row: int, rows_by_rank: list[Int64], digests: Sequence[npt.NDArray[np.uint64]]) -> str:
    sides: dict[int, list[int]] = {}
    for rank, (rows, values) in enumerate(zip(rows_by_rank, digests, strict=True)):
        for place in np.flatnonzero(rows == row).tolist():
            sides.setdefault(int(values[place]), []).append(rank)
    return describe_sides(list(sides.values()))


def describe_sides(sides: Sequence[Sequence[int]]) -> str:
    """``ranks 0, 1 have one value, rank 2 another``."""
    words = ["one value", "another", *["yet another"] * len(sides)]
    told = [
        f"{rank_list(side)} ha{'ve' if len(side) > 1 else 's'} {word}"
        for side, word in zip(sides, words, strict=False)
    ]
    return listed(told, most=4, show=str)
