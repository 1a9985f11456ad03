"""Where a checkpoint comes from, and what was made of it."""

from __future__ import annotations

from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records import labels

__all__ = ["LineageAnswer"]


@answers(labels.LineageNode)
class LineageNode(RecordAnswer):
    """A checkpoint."""


@answers(labels.LineageEdge)
class LineageEdge(RecordAnswer):
    """One was made of another."""


@answers(labels.Lineage)
class LineageAnswer(RecordAnswer):
    """All ancestors and descendants that the key may see, nearest first."""
