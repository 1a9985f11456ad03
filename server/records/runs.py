"""Runs: the folders that hold checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from dcp.server.records.declaring import Joined, Shown, Stored

__all__ = ["Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """A folder that holds checkpoints; counts, sums and the latest are of the committed ones."""

    id: Annotated[int, Stored("id")]
    root: Annotated[str, Joined("roots", "name")]
    key: Annotated[str, Stored("name"), Shown("Relative to the root; empty: the root itself.")]
    checkpoint_count: Annotated[int, Stored("integer", default=0)]
    latest_step: Annotated[int | None, Stored("large")]
    latest_at: Annotated[datetime | None, Stored("seconds")]  # when the newest was committed
    bytes: Annotated[int, Stored("large", default=0)]
    created_at: Annotated[datetime, Stored("seconds")]
    updated_at: Annotated[datetime, Stored("seconds")]
