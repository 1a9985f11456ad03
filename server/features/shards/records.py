"""Records of shards and of the phases of a save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dcp.server.records.declaring import Shown

__all__ = [
    "Chunk",
    "PhaseRow",
    "RankShare",
    "SavePhase",
    "SavePhases",
    "ShardMap",
    "ShardMapRow",
    "ShardedTensor",
    "StoredChunk",
]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the file with its bytes."""

    rank: int | None
    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int
    file_offset: Annotated[int | None, Shown("Of its first byte in the file; null: not known.")] = None


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor and how it is cut; ``chunks`` are the first of ``chunk_count``."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunk_count: int
    chunks: Annotated[tuple[Chunk, ...], Shown("The first 4,096 of them.")]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, and where its bytes are."""

    fqn: str
    dtype: str
    rank: int | None
    file: str
    file_offset: Annotated[int, Shown("Of its first byte in the file.")]
    bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: Annotated[int | None, Shown("How often this box is stored; null: too many to compare.")]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank wrote; ``rank`` None is files whose names tell none."""

    rank: Annotated[int | None, Shown("None: of files whose names tell none.")]
    files: int
    file_bytes: int | None
    chunks: int
    tensors: int
    tensor_bytes: int


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
    """What lies where: rows of files by rank, and in each row bins of ``bin_bytes`` from ``begin`` on.

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
    """How long the phases of a save took, by rank; nothing where the writer noted nothing.

    ``blocking_seconds`` and ``background_seconds`` are of the slowest rank in each phase.
    """

    rank_count: int
    phases: tuple[SavePhase, ...]
    rows: tuple[PhaseRow, ...]
    blocking_seconds: float
    background_seconds: float
    assemble_seconds: Annotated[float | None, Shown("Of the coordinator, for the index.")]
