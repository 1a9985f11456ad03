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
    "EntryKind",
    "File",
    "FileRole",
    "ObjectDifference",
    "RankShare",
    "ShardedTensor",
    "Statistics",
    "StoredChunk",
    "Tensor",
    "TensorDifference",
    "TensorFacts",
    "TreeNode",
    "Verification",
]

Basis = Literal["checksums", "structure"]
"""checksums: values too, by the CRC-32s that both indexes have. structure: names, shapes and dtypes alone."""
EntryKind = Literal["tensor", "object"]
FileRole = Literal["data", "commit", "other"]
"""It holds tensors; it makes the folder a checkpoint; it lies there as well (config.json)."""
_Difference = Literal["added", "removed", "shape", "dtype", "changed", "undecided"]


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
    begin: Annotated[int, Shown("The first byte in the file.")]
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
class TensorDifference:
    """A tensor that is not the same on both sides; "undecided": the job "diff" can tell of its values."""

    fqn: str
    kind: Annotated[str, OneOf(_Difference)]
    before: TensorFacts | None
    after: TensorFacts | None


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A value that is not the same on both sides."""

    fqn: str
    kind: Annotated[str, OneOf(_Difference)]


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs; ``tensors`` are all of them, ``objects`` the first 500 of ``object_count``."""

    a: int
    b: int
    basis: Annotated[str, OneOf(Basis)]
    counts: Mapping[str, int]
    equal_tensors: int
    equal_objects: int
    object_count: Annotated[int, Shown("Of the values that differ.")]
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]


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
    """Of the values of all tensors together (``total``) and of each; ``is_stale``: it was replaced since."""

    is_stale: Annotated[bool, Shown("The checkpoint was replaced since they were computed.")]
    created_at: datetime
    job_id: int | None
    total: Any
    tensor_count: int
    tensors: tuple[Any, ...]
