"""Runs: the folders that hold checkpoints, and their checkpoints over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from dcp.server.records.declaring import JoinedColumn, OwnColumn, Shown

__all__ = ["BinValues", "Run", "RunTimeline", "TimelineBin"]


@dataclass(frozen=True, slots=True)
class Run:
    """A folder that holds checkpoints; counts, sums and the latest are of the committed ones."""

    id: Annotated[int, OwnColumn("id")]
    root: Annotated[str, JoinedColumn("roots", "name")]
    key: Annotated[str, OwnColumn("name"), Shown("Relative to the root; empty: the root itself.")]
    checkpoint_count: Annotated[int, OwnColumn("integer", default=0)]
    latest_step: Annotated[int | None, OwnColumn("large")]
    latest_at: Annotated[datetime | None, OwnColumn("seconds")]  # when the newest was committed
    bytes: Annotated[int, OwnColumn("large", default=0)]
    created_at: Annotated[datetime, OwnColumn("seconds")]
    updated_at: Annotated[datetime, OwnColumn("seconds")]


@dataclass(frozen=True, slots=True)
class BinValues:
    """The values of the checkpoints of a bin that have one; ``last`` is that of the highest step."""

    name: Annotated[str, Shown("What is summed up: bytes, save_seconds, or a metric's name.")]
    count: int
    min: float
    max: float
    mean: float
    last: float


@dataclass(frozen=True, slots=True)
class TimelineBin:
    """Neighbouring checkpoints of a run by step, ``count`` of them in whatever states.

    ``checkpoint_id`` is the last committed one, or the last of all where none is. Values are of committed
    ones; ``save_seconds`` are those of the slowest rank in each phase, of saves that noted them.
    """

    checkpoint_id: Annotated[int, Shown("The last committed one, or the last of all.")]
    first_step: int
    last_step: int
    first_at: datetime
    last_at: Annotated[datetime, Shown("When the newest was committed.")]
    count: int
    states: Annotated[Mapping[str, int], Shown("Checkpoints by state.")]
    verifications: Annotated[Mapping[str, int], Shown("Committed checkpoints by verification.")]
    pinned: int
    aliases: tuple[str, ...]
    bytes: BinValues | None
    save_seconds: BinValues | None
    metrics: tuple[BinValues, ...]


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """The checkpoints of a run that have a step, in bins; ``metric_names`` are those its newest one has."""

    run_id: int
    count: Annotated[int, Shown("Checkpoints with a step, within the requested steps.")]
    metric_names: Annotated[tuple[str, ...], Shown("What the newest checkpoint that has metrics has.")]
    bins: tuple[TimelineBin, ...]
