"""Drawings of a checkpoint: phases of its save, shards of its ranks, values of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from dcp.server.records.declaring import Shown

__all__ = [
    "PhaseRow",
    "SavePhase",
    "SavePhases",
    "ShardMap",
    "ShardMapRow",
    "TensorGrid",
    "TensorStatistics",
]


@dataclass(frozen=True, slots=True)
class SavePhase:
    """A phase of a save, over all ranks that noted it. ``within``: it is a part of that one.

    ``is_blocking``: training waited for it.
    """

    name: str
    within: Annotated[str | None, Shown("The phase that it is a part of.")]
    is_blocking: Annotated[bool, Shown("Training waited for it.")]
    ranks: Annotated[int, Shown("That noted it.")]
    min_seconds: float
    median_seconds: float
    max_seconds: float
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """Neighbouring ranks; ``seconds`` are by phase, of the slowest of them, in the order of the phases."""

    first_rank: int
    last_rank: int
    slowest_rank: Annotated[int, Shown("The one whose phases together took longest.")]
    total_seconds: Annotated[float, Shown("Of the slowest one, all phases that are no part of another.")]
    seconds: Annotated[tuple[float | None, ...], Shown("By phase: of the slowest rank in it.")]


@dataclass(frozen=True, slots=True)
class SavePhases:
    """Seconds of the phases of a save, by rank; empty where the writer noted nothing.

    ``blocking_seconds`` and ``background_seconds`` are of the slowest rank in each phase.
    """

    rank_count: int
    phases: tuple[SavePhase, ...]
    rows: tuple[PhaseRow, ...]
    blocking_seconds: float
    background_seconds: float
    assemble_seconds: Annotated[float | None, Shown("Of the coordinator, for the index.")]


@dataclass(frozen=True, slots=True)
class ShardMapRow:
    """Files of neighbouring ranks. ``rank`` None: of files whose names tell none."""

    first_rank: int | None
    last_rank: int | None
    file: Annotated[str, Shown("The first of them.")]
    files: int
    file_bytes: Annotated[int | None, Shown("null: not known.")]
    tensor_bytes: int
    largest_rank_bytes: Annotated[int, Shown("Of the rank that has the most in them.")]
    replicated_bytes: Annotated[int, Shown("Of tensors of which more is stored than there is of them.")]
    chunks: Annotated[int, Shown("Of tensors, in them.")]


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Shards by place: rows of files by rank, and in each row bins of ``bin_bytes`` from ``begin`` on.

    Cells that hold something are columns of one length: their row, bin, the bytes and chunks of tensors in
    them, and the largest of these: its name in ``names`` and its dtype in ``dtypes``, by number.
    """

    rank_count: int
    file_count: int
    begin: int
    end: int
    bin_bytes: int
    bins: int
    largest_rank: Annotated[int | None, Shown("The one that has the most bytes of tensors.")]
    largest_rank_bytes: int
    mean_rank_bytes: float
    rows: tuple[ShardMapRow, ...]
    names: tuple[str, ...]
    name_bytes: Annotated[tuple[int, ...], Shown("Of names: how much of it is stored, by all ranks.")]
    name_layers: Annotated[tuple[int | None, ...], Shown("Of names: the number of its layer, if it has one.")]
    is_replicated: Annotated[tuple[bool, ...], Shown("Of names: more of it is stored than there is.")]
    dtypes: tuple[str, ...]
    cell_rows: tuple[int, ...]
    cell_bins: tuple[int, ...]
    cell_bytes: tuple[int, ...]
    cell_chunks: tuple[int, ...]
    cell_names: Annotated[tuple[int, ...], Shown("Places in names: the tensor with the most bytes.")]
    cell_dtypes: Annotated[tuple[int, ...], Shown("Places in dtypes: of that tensor.")]


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


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Of one tensor's values. ``is_kept``: as a job has computed them, at ``computed_at``; else they were
    read for this answer."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    statistics: Annotated[Mapping[str, Any] | None, Shown("null: bits without a meaning as numbers.")]
    is_kept: Annotated[bool, Shown("As a job has computed them; else they were read for this answer.")]
    computed_at: Annotated[datetime | None, Shown("By the job.")] = None
