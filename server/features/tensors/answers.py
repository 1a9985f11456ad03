"""What is in a checkpoint: files, tensors, shards, differences."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dcp.server.core.answers import Answer
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records import contents

__all__ = [
    "ChunkAnswer",
    "DiffAnswer",
    "FileAnswer",
    "FileList",
    "LoadCheckAnswer",
    "LoadFindingsAnswer",
    "LoadProblemAnswer",
    "LostFileAnswer",
    "ObjectDifferenceAnswer",
    "RankShareAnswer",
    "RankShareList",
    "ShardPage",
    "ShardedTensorAnswer",
    "StoredChunkAnswer",
    "StoredChunkPage",
    "TensorAnswer",
    "TensorDifferenceAnswer",
    "TensorFactsAnswer",
    "TensorPage",
    "TreeNodeAnswer",
    "TreePageAnswer",
    "ValueDifferenceAnswer",
    "binary",
]


@answers(contents.File)
class FileAnswer(RecordAnswer):
    """A file of a checkpoint."""


@answers(contents.LostFile)
class LostFileAnswer(RecordAnswer):
    """A data file that the index names and the storage does not have whole."""


class FileList(Answer):
    """All files of a checkpoint, by name; and those that it lacks."""

    items: list[FileAnswer]
    missing: list[LostFileAnswer] = Field(default_factory=list)


@answers(contents.Tensor)
class TensorAnswer(RecordAnswer):
    """A tensor, or a value that is none (then without dtype and shape)."""


class TensorPage(Answer):
    """Tensors and values in the order of their names."""

    items: list[TensorAnswer]
    next_cursor: str | None


@answers(contents.TreeNode)
class TreeNodeAnswer(RecordAnswer):
    """What is called `name` below the prefix, with the sums of all below it."""


class TreePageAnswer(Answer):
    """One level of the tree of names, in their order."""

    prefix: str
    items: list[TreeNodeAnswer]
    next_cursor: str | None


@answers(contents.RankShare)
class RankShareAnswer(RecordAnswer):
    """What one rank wrote."""


class RankShareList(Answer):
    """The shares of all ranks; those of a page."""

    items: list[RankShareAnswer]
    next_cursor: str | None


@answers(contents.Chunk)
class ChunkAnswer(RecordAnswer):
    """A box of a tensor, and the file with its bytes."""


@answers(contents.ShardedTensor)
class ShardedTensorAnswer(RecordAnswer):
    """A tensor and how it is cut."""


class ShardPage(Answer):
    """Tensors with their chunks, in the order in which they were saved."""

    items: list[ShardedTensorAnswer]
    next_cursor: str | None


@answers(contents.StoredChunk)
class StoredChunkAnswer(RecordAnswer):
    """A box of a tensor, and where its bytes are."""


class StoredChunkPage(Answer):
    """Chunks in the order of ranks, files and bytes."""

    items: list[StoredChunkAnswer]
    next_cursor: str | None


@answers(contents.TensorFacts)
class TensorFactsAnswer(RecordAnswer):
    """What a tensor is on one side."""


@answers(contents.ValueDifference)
class ValueDifferenceAnswer(RecordAnswer):
    """By how much the values of a tensor differ."""


@answers(contents.TensorDifference)
class TensorDifferenceAnswer(RecordAnswer):
    """A tensor that is not the same on both sides; undecided: of values the checksums do not tell."""


@answers(contents.ObjectDifference)
class ObjectDifferenceAnswer(RecordAnswer):
    """A value that is not the same on both sides; undecided: it is pickled, and was not read."""


@answers(contents.Diff)
class DiffAnswer(RecordAnswer):
    """What differs. `counts` are of all tensors, `tensors` are a page of those that were asked for; `objects`
    are the first 500."""

    next_cursor: str | None


@answers(contents.LoadProblem)
class LoadProblemAnswer(RecordAnswer):
    """A name that is not the same in a state and in the checkpoint that is to fill it."""


@answers(contents.LoadFindings)
class LoadFindingsAnswer(RecordAnswer):
    """How the names of a state fit."""


@answers(contents.LoadCheck)
class LoadCheckAnswer(RecordAnswer):
    """Whether a checkpoint fills a state, as far as names, shapes and dtypes tell. `answer`: rename and cast
    are what has to be given to dcp.load."""


def binary(description: str) -> dict[int | str, dict[str, Any]]:
    """For ``responses=`` of a route that answers with bytes: all, a range, or that nothing changed."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        200: {"description": description, "content": content},
        206: {"description": "The range that was asked for.", "content": content},
        304: {"description": "Nothing has changed (If-None-Match)."},
    }
