"""Runs."""

from __future__ import annotations

from pydantic import Field

from dcp.server.core.answers import Answer
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records.administration import TensorBytes
from dcp.server.records.labels import Series, SeriesPoint
from dcp.server.records.runs import BinValues, Run, RunTimeline, TimelineBin

__all__ = [
    "BinValuesAnswer",
    "PointAnswer",
    "RunAnswer",
    "RunList",
    "SeriesAnswer",
    "TensorBytesAnswer",
    "TimelineAnswer",
    "TimelineBinAnswer",
]


@answers(Run)
class RunAnswer(RecordAnswer):
    """A folder that holds checkpoints; what is counted are committed ones."""


@answers(SeriesPoint)
class PointAnswer(RecordAnswer):
    """Neighbouring checkpoints of a run, of which there may be one."""


@answers(Series)
class SeriesAnswer(RecordAnswer):
    """A metric over the steps of a run."""


@answers(BinValues)
class BinValuesAnswer(RecordAnswer):
    """The values of the checkpoints of a bin that have one."""


@answers(TimelineBin)
class TimelineBinAnswer(RecordAnswer):
    """Neighbouring checkpoints of a run, of which there may be one. Values are of committed ones."""


@answers(RunTimeline)
class TimelineAnswer(RecordAnswer):
    """The checkpoints of a run over its steps."""


@answers(TensorBytes)
class TensorBytesAnswer(RecordAnswer):
    """Bytes of some tensors of older checkpoints."""


class RunList(Answer):
    """A page."""

    items: list[RunAnswer]
    next_cursor: str | None
    notes: list[str] = Field(
        default=[],
        description="Why something may be missing: a root's first scan has not ended, its last one failed.",
    )
