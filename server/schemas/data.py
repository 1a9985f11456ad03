"""What is in a checkpoint: files, tensors, shards, differences."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dcp.server.schemas.common import Answer

__all__ = [
    "Basis",
    "ChunkAnswer",
    "DiffAnswer",
    "FileAnswer",
    "FileList",
    "ObjectDifferenceAnswer",
    "RankShareAnswer",
    "RankShareList",
    "ShardPage",
    "ShardedTensorAnswer",
    "TensorAnswer",
    "TensorDifferenceAnswer",
    "TensorFactsAnswer",
    "TensorPage",
    "TreeNodeAnswer",
    "TreePageAnswer",
    "binary",
]

Basis = Literal["checksums", "structure"]
"""checksums: values too, by the CRC-32s that both indexes have. structure: names, shapes and dtypes alone."""

EntryKind = Literal["tensor", "object"]
_Difference = Literal["added", "removed", "shape", "dtype", "changed", "undecided"]


class FileAnswer(Answer):
    """A file of a checkpoint."""

    name: str
    bytes: int
    modified_at: str
    role: Literal["data", "commit", "other"] = Field(
        description="data: it holds tensors; commit: it makes the folder a checkpoint."
    )


class FileList(Answer):
    """All files of a checkpoint, by name."""

    items: list[FileAnswer]


class TensorAnswer(Answer):
    """A tensor, or a value that is none (then without dtype and shape)."""

    fqn: str
    kind: EntryKind
    dtype: str | None
    shape: list[int] | None
    bytes: int


class TensorPage(Answer):
    """Tensors and values in the order of their names."""

    items: list[TensorAnswer]
    next_cursor: str | None


class TreeNodeAnswer(Answer):
    """What is called `name` below the prefix, with the sums of all below it."""

    name: str
    tensors: int
    objects: int
    bytes: int
    entry: TensorAnswer | None = Field(description="Set where the name itself is a tensor or a value.")


class TreePageAnswer(Answer):
    """One level of the tree of names, in their order."""

    prefix: str
    items: list[TreeNodeAnswer]
    next_cursor: str | None


class RankShareAnswer(Answer):
    """What one rank wrote."""

    rank: int | None = Field(description="None: of files whose names tell none.")
    files: int
    file_bytes: int | None
    chunks: int
    tensors: int
    tensor_bytes: int


class RankShareList(Answer):
    """The shares of all ranks; those of a page."""

    items: list[RankShareAnswer]
    next_cursor: str | None


class ChunkAnswer(Answer):
    """A box of a tensor, and the file with its bytes."""

    rank: int | None
    file: str
    offsets: list[int]
    sizes: list[int]
    bytes: int


class ShardedTensorAnswer(Answer):
    """A tensor and how it is cut."""

    fqn: str
    dtype: str
    shape: list[int]
    chunk_count: int
    chunks: list[ChunkAnswer] = Field(description="The first 4,096 of them.")


class ShardPage(Answer):
    """Tensors with their chunks, in the order in which they were saved."""

    items: list[ShardedTensorAnswer]
    next_cursor: str | None


class TensorFactsAnswer(Answer):
    """What a tensor is on one side."""

    dtype: str
    shape: list[int]


class TensorDifferenceAnswer(Answer):
    """A tensor that is not the same on both sides; undecided: of values the checksums do not tell."""

    fqn: str
    kind: _Difference
    before: TensorFactsAnswer | None
    after: TensorFactsAnswer | None


class ObjectDifferenceAnswer(Answer):
    """A value that is not the same on both sides; undecided: it is pickled, and was not read."""

    fqn: str
    kind: _Difference


class DiffAnswer(Answer):
    """What differs. `counts` are of all tensors, `tensors` are a page; `objects` are the first 500."""

    a: int
    b: int
    basis: Basis
    counts: dict[str, int]
    equal_tensors: int
    equal_objects: int
    object_count: int = Field(description="Of the values that differ.")
    tensors: list[TensorDifferenceAnswer]
    objects: list[ObjectDifferenceAnswer]
    next_cursor: str | None


def binary(description: str) -> dict[int | str, dict[str, Any]]:
    """For ``responses=`` of a route that answers with bytes: all, a range, or that nothing changed."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        200: {"description": description, "content": content},
        206: {"description": "The range that was asked for.", "content": content},
        304: {"description": "Nothing has changed (If-None-Match)."},
    }
