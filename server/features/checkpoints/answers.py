"""Checkpoints as they are listed and shown, and what a trainer says of one."""

from __future__ import annotations

from pydantic import Field

from dcp.server.core.answers import Answer
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records import search
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail, Registered

__all__ = [
    "CheckpointAnswer",
    "CheckpointDetailAnswer",
    "CheckpointList",
    "FacetAnswer",
    "FacetValueAnswer",
    "FacetsAnswer",
    "RegisteredAnswer",
]


@answers(Checkpoint)
class CheckpointAnswer(RecordAnswer):
    """A checkpoint with its labels. ``etag`` is for If-Match."""


@answers(CheckpointDetail)
class CheckpointDetailAnswer(CheckpointAnswer):
    """All that is known of a checkpoint."""


class CheckpointList(Answer):
    """A page."""

    items: list[CheckpointAnswer]
    next_cursor: str | None
    notes: list[str] = Field(
        default=[],
        description="Why something may be missing: a root's first scan has not ended, its last one failed.",
    )


@answers(Registered)
class RegisteredAnswer(RecordAnswer):
    """What came of it. ``id`` is null where something was deleted that had never been known."""


@answers(search.FacetValue)
class FacetValueAnswer(RecordAnswer):
    """A value of a filter, and how many checkpoints it would leave."""


@answers(search.Facet)
class FacetAnswer(RecordAnswer):
    """The values of one filter, the most frequent first."""


@answers(search.CheckpointFacets)
class FacetsAnswer(RecordAnswer):
    """Counts beside a list: each filter's with all others applied."""
