"""Shards and phases of a save, as they are asked for and answered."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from dcp.server.catalog.names import check_pattern
from dcp.server.core.inputs import Text
from dcp.server.core.problems import UnprocessableError
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.features.checkpoints.queries import MAX_PAGE, Query
from dcp.server.records import drawings

__all__ = ["PhasesAnswer", "ShardMapAnswer", "ShardMapQuery", "StoredChunksQuery"]

_Rank = Annotated[int, Field(ge=0, lt=1 << 31)]
_Offset = Annotated[int, Field(ge=0, lt=1 << 62)]


class _PartOfMap(Query):
    first_rank: _Rank | None = None
    last_rank: _Rank | None = None
    begin: Annotated[_Offset, Field(description="The first byte of each file.")] = 0
    end: Annotated[_Offset, Field(description="Behind the last byte; that of the longest file.")] | None = (
        None
    )
    glob: Annotated[Text, StringConstraints(min_length=1, max_length=256)] | None = None

    def check(self) -> None:
        """Raises UnprocessableError, InvalidQueryError."""
        if self.end is not None and self.end <= self.begin:
            raise UnprocessableError("the end is not behind the begin", field="end")
        if self.glob is not None:
            check_pattern("glob", self.glob)


class ShardMapQuery(_PartOfMap):
    """Which ranks, bytes and tensors, in how many cells."""

    rows: Annotated[int, Field(ge=1, le=512, description="As many rows of files at most.")] = 128
    bins: Annotated[int, Field(ge=1, le=512, description="As many bins of bytes at most.")] = 64


class StoredChunksQuery(_PartOfMap):
    """Which ranks, bytes and tensors."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE, description="Rows of a page at most.")] = 50
    cursor: (
        Annotated[
            str, Field(min_length=1, max_length=4096, description="The next_cursor of the page before.")
        ]
        | None
    ) = None


@answers(drawings.SavePhase)
class SavePhaseAnswer(RecordAnswer):
    """A phase of a save, over all ranks."""


@answers(drawings.PhaseRow)
class PhaseRowAnswer(RecordAnswer):
    """Neighbouring ranks, of which there may be one."""


@answers(drawings.SavePhases)
class PhasesAnswer(RecordAnswer):
    """How long the phases of a save took, by rank."""


@answers(drawings.ShardMapRow)
class ShardMapRowAnswer(RecordAnswer):
    """Files of neighbouring ranks, of which there may be one."""


@answers(drawings.ShardMap)
class ShardMapAnswer(RecordAnswer):
    """What lies where: rows of files by rank, bins of bytes. Cells are columns of one length."""
