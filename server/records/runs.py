"""Runs: the folders that hold checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from dcp.server.records.declaring import JoinedColumn, OwnColumn, Shown

__all__ = ["Run"]


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
