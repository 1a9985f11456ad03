"""Roots."""

from __future__ import annotations

from pydantic import Field

from dcp.server.core.answers import Answer
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records.roots import Root

__all__ = ["RootAnswer", "RootCheck", "RootCheckList", "RootList"]


@answers(Root)
class RootAnswer(RecordAnswer):
    """A place where checkpoints are found."""


class RootList(Answer):
    """All roots that the key may see, by name."""

    items: list[RootAnswer]


class RootCheck(Answer):
    """Whether the storage of a root answers now, and is the one that the catalog knows."""

    root: str
    is_ok: bool
    detail: str | None = Field(description="What is wrong; null if nothing is.")


class RootCheckList(Answer):
    """All roots of the settings that the key may see, by name."""

    items: list[RootCheck]
