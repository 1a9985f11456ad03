"""Labels: tags, pins and metrics of checkpoints, aliases of runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dcp.server.core.answers import Answer
from dcp.server.core.inputs import MAX_ID, Finite, Name, Request
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records.labels import Alias

__all__ = ["AliasAnswer", "AliasChange", "AliasList", "MetricsChange"]


class MetricsChange(Request):
    """Metrics by name; null takes one away, those that are not named stay."""

    metrics: Annotated[dict[Name, Finite | None], Field(min_length=1, max_length=256)]


class AliasChange(Request):
    """Which checkpoint of the run the alias is to name; ``is_protected`` needs the scope admin."""

    checkpoint_id: Annotated[int, Field(ge=1, le=MAX_ID)]
    is_protected: bool | None = None


@answers(Alias)
class AliasAnswer(RecordAnswer):
    """A name that moves from checkpoint to checkpoint of a run. ``etag`` is for If-Match."""


class AliasList(Answer):
    """All aliases of a run, by name."""

    items: list[AliasAnswer]
