"""Roots."""

from __future__ import annotations

from dcp.server.records.roots import Root
from dcp.server.schemas.common import Answer
from dcp.server.schemas.records import RecordAnswer, answers

__all__ = ["RootAnswer", "RootList"]


@answers(Root)
class RootAnswer(RecordAnswer):
    """A place where checkpoints are found."""


class RootList(Answer):
    """All roots that the key may see, by name."""

    items: list[RootAnswer]
