"""Checkpoints as they are listed and shown, and what a trainer says of one."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from dcp.server.core.answers import Answer
from dcp.server.core.inputs import MAX_ID, Finite, Name, Request, Text
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.features.scan.registering import Registration
from dcp.server.records import search
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail, Registered

__all__ = [
    "CheckpointAnswer",
    "CheckpointDetailAnswer",
    "CheckpointList",
    "FacetAnswer",
    "FacetValueAnswer",
    "FacetsAnswer",
    "NewRegistration",
    "RegisteredAnswer",
]

_MAX_LABELS = 256


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


class NewRegistration(Request):
    """A trainer says that there is a checkpoint, or (``deleted``) that there is not any more.

    The service looks for itself: what is committed, and its size and structure, are never taken on anybody's
    word. One of ``root`` and ``root_url`` (the URL of the folder that holds it) is needed.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"root": "main", "key": "run/step-1", "tags": ["nightly"], "metrics": {"loss": 2.5}}]
        }
    )

    root: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = None
    root_url: Annotated[Text, StringConstraints(min_length=1)] | None = None
    key: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    step: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    save_id: Annotated[Text, StringConstraints(min_length=1, max_length=64)] | None = None
    tags: Annotated[list[Name], Field(max_length=_MAX_LABELS)] = Field(default_factory=list)
    metrics: Annotated[dict[Name, Finite], Field(max_length=_MAX_LABELS)] = Field(default_factory=dict)
    deleted: bool = False

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if (self.root is None) == (self.root_url is None):
            raise ValueError("one of root and root_url is needed")
        return self

    @property
    def registration(self) -> Registration:
        """For `dcp.server.features.scan.registering.register`."""
        return Registration(
            key=self.key,
            root=self.root,
            root_url=self.root_url,
            step=self.step,
            save_id=self.save_id,
            tags=frozenset(self.tags),
            metrics=self.metrics,
            deleted=self.deleted,
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
