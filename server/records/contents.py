"""What is in a checkpoint: files, tensors, shards, what differs; and what was found out about its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from dcp.server.records.declaring import OneOf, Shown

__all__ = [
    "Basis",
    "Chunk",
    "Diff",
    "DifferenceKind",
    "DifferenceOrder",
    "EntryKind",
    "File",
    "FileRole",
    "LoadAnswer",
    "LoadCheck",
    "LoadFindings",
    "LoadProblem",
    "LoadProblemKind",
    "LostFile",
    "ObjectDifference",
    "RankShare",
    "ShardedTensor",
    "Statistics",
    "StoredChunk",
    "Tensor",
    "TensorDifference",
    "TensorFacts",
    "TreeNode",
    "ValueDifference",
    "Verification",
]

Basis = Literal["values", "checksums", "structure"]
"""values: as the job "diff" has found last. checksums: whether they differ, by the CRC-32s in both indexes.
structure: names, shapes and dtypes alone."""
DifferenceKind = Literal["added", "removed", "shape", "dtype", "changed", "undecided"]
DifferenceOrder = Literal["name", "relative_l2", "changed", "nonfinite", "weights"]
"""name: as they were saved. The others: those first that differ most."""
LoadAnswer = Literal["yes", "rename", "cast", "no"]
LoadProblemKind = Literal["missing", "shape", "dtype", "kind", "unexpected"]
"""kind: a tensor on one side, another value on the other. unexpected: in the checkpoint alone; left there."""
EntryKind = Literal["tensor", "object"]
FileRole = Literal["data", "commit", "other"]
"""It holds tensors; it makes the folder a checkpoint; it lies there as well (config.json)."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint; ``role``: "data", "commit" or "other"."""

    name: str
    bytes: int
    modified_at: datetime
    role: Annotated[
        str, OneOf(FileRole), Shown("data: it holds tensors; commit: it makes the folder a checkpoint.")
    ]


@dataclass(frozen=True, slots=True)
class LostFile:
    """A data file that the index names and the storage does not have whole."""

    name: str
    bytes: Annotated[int | None, Shown("That the storage has; null: there is no such file.")]
    expected_bytes: Annotated[int | None, Shown("That were written; null where the index does not tell.")]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, or a value that is none (``kind`` "object", without dtype and shape)."""

    fqn: str
    kind: Annotated[str, OneOf(EntryKind)]
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """What is below one name, summed up; ``entry`` where the name itself is a tensor or a value."""

    name: str
    tensors: int
    objects: int
    bytes: int
    entry: Annotated[Tensor | None, Shown("Set where the name itself is a tensor or a value.")] = None


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
class TensorFacts:
    """What a tensor is on one side of a difference."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """By how much the values of a tensor differ. ``relative_l2``: the L2 norm of the differences divided by
    that of the tensor before."""

    elements: int
    differing: Annotated[int, Shown("That are not the same.")]
    nonfinite: Annotated[int, Shown("Of these, NaN or infinite on a side.")]
    max_abs: Annotated[
        float | None,
        Shown("The greatest difference; null for bits without a meaning, and where nothing is finite."),
    ]
    relative_l2: Annotated[
        float | None,
        Shown(
            "The L2 norm of the differences divided by that of the tensor before; null if that is 0, and "
            "where nothing is finite."
        ),
    ]
    nonfinite_after: Annotated[
        int, Shown("NaN or infinite in the tensor after, whether they differ or not.", may_be_absent=True)
    ] = 0


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same on both sides; "undecided": the job "diff" can tell of its values.
    ``values``: by how much, where that job has compared them."""

    fqn: str
    kind: Annotated[str, OneOf(DifferenceKind)]
    before: TensorFacts | None
    after: TensorFacts | None
    values: Annotated[
        ValueDifference | None, Shown("By how much, as the job has found.", may_be_absent=True)
    ] = None


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A value that is not the same on both sides: the first 200 characters of each, if it is plain data."""

    fqn: str
    kind: Annotated[str, OneOf(DifferenceKind)]
    before: Annotated[str | None, Shown("As text, cut; of plain data.", may_be_absent=True)] = None
    after: Annotated[str | None, Shown("As text, cut; of plain data.", may_be_absent=True)] = None


@dataclass(frozen=True, slots=True)
class Diff:
    """Differences. `counts` are of all tensors, `tensors` are a page of the requested ones; `objects` are the
    first 500 of ``object_count``."""

    a: int
    b: int
    basis: Annotated[str, OneOf(Basis)]
    counts: Mapping[str, int]
    equal_tensors: int
    equal_objects: int
    object_count: Annotated[int, Shown("Of the values that differ.")]
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]
    next_cursor: str | None
    matching: Annotated[int | None, Shown("Tensors that differ and were asked for.", may_be_absent=True)] = (
        None
    )
    job_id: Annotated[int | None, Shown("The job that compared values.", may_be_absent=True)] = None
    created_at: Annotated[datetime | None, Shown("Of that job.", may_be_absent=True)] = None


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """A name that is not the same in a state and in the checkpoint that is to fill it. ``stored_fqn``: what
    it is called in the checkpoint."""

    kind: Annotated[str, OneOf(LoadProblemKind)]
    fqn: Annotated[str, Shown("As the state has it; of an unexpected one as the checkpoint has it.")]
    stored_fqn: Annotated[str | None, Shown("In the checkpoint; null if it is not there.")]
    wanted: Annotated[TensorFacts | None, Shown("In the state; null of values and of what is not known.")]
    stored: Annotated[TensorFacts | None, Shown("In the checkpoint.")]


@dataclass(frozen=True, slots=True)
class LoadFindings:
    """How the names of a state fit. ``counts``: by kind of problem; ``problems``: the first 500 of each."""

    matching: Annotated[int, Shown("That are there, with this shape and dtype as far as they are known.")]
    counts: Annotated[Mapping[str, int], Shown("By kind of problem, all of them.")]
    problems: Annotated[tuple[LoadProblem, ...], Shown("The first 500 of each kind.")]


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """Whether a checkpoint fills a state, as far as names, shapes and dtypes tell. ``rename``: what lets
    `dcp.load` find what is missing under other names, {} if nothing does; ``renamed``: what is found then.

    ``answer``: "yes"; "rename": with that; "cast": with dtype="cast", and that if it is not {}; "no".
    """

    checkpoint_id: int
    answer: Annotated[str, OneOf(LoadAnswer)]
    wanted: Annotated[int, Shown("Names in the state.")]
    plain: Annotated[LoadFindings, Shown("Without a renaming.")]
    rename: Annotated[Mapping[str, str], Shown("For dcp.load; {} if it mends nothing.")]
    renamed: Annotated[LoadFindings | None, Shown("With that.")]
    hint: Annotated[str | None, Shown("What dcp.load would say about what is missing.")]
    code: Annotated[str, Shown("Lines of Python that load it.")]


@dataclass(frozen=True, slots=True)
class Verification:
    """One verification; ``is_current``: the checkpoint is still what was verified."""

    id: int
    outcome: Annotated[str, Shown("good or damaged.")]
    mode: str
    is_current: Annotated[bool, Shown("Whether the checkpoint is still what was verified.")]
    findings: Any
    checked_bytes: int
    seconds: float
    created_at: datetime
    job_id: int | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the values of all tensors together, and of those of this page."""

    is_stale: Annotated[bool, Shown("The checkpoint was replaced since they were computed.")]
    created_at: datetime
    job_id: int | None
    total: Any
    tensor_count: int
    tensors: tuple[Any, ...]
    next_cursor: str | None
