"""Runs by metrics: filters, sorting, and comparison over stored values per run.

The tables contain derived data only, and can be emptied at any time: a worker fills them.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, String, Table

from dcp.server.core.feature import Feature, Link
from dcp.server.database.mapping import ID, NAME
from dcp.server.database.tables import metadata

_LINK: Final = Link("run", "Compare with others", "/runs?run={id}")

feature: Final = Feature(
    "run_metrics", __name__, web=["listing", "comparison"], work=["summing"], links=[_LINK]
)
"""List and comparison pages of runs. A worker stores the values for sorting."""


def _run() -> Column[int]:
    return Column("run_id", ID, ForeignKey("runs.id"), primary_key=True)


run_summaries: Final = Table(
    "run_summaries",
    metadata,
    _run(),
    Column("seen_seconds", Float, nullable=False),  # ``updated_seconds`` at the time of the summary
    # minimum time until the next summary, because runs with many checkpoints take long
    Column("due_seconds", Float, nullable=False),
)
"""Runs with a summary."""

run_metrics: Final = Table(
    "run_metrics",
    metadata,
    _run(),
    Column("name", String(128), primary_key=True),
    Column("count", Integer, nullable=False),
    *(
        column
        for place in ("last", "min", "max")
        for column in (
            Column(place, Float, nullable=False),
            Column(f"{place}_id", ID, nullable=False),  # of the checkpoint
            Column(f"{place}_step", BigInteger),
        )
    ),
    Index(None, "name", "last", "run_id"),
    Index(None, "name", "min", "run_id"),
    Index(None, "name", "max", "run_id"),
)
"""Values of a metric over the committed checkpoints of a run; ``last``: value of the highest step."""

run_metadata: Final = Table(
    "run_metadata",
    metadata,
    _run(),
    Column("name", NAME, primary_key=True),
    Column("value", NAME, nullable=False),
    Column("number", Float),
    Index(None, "name", "value", "run_id"),
    Index(None, "name", "number", "run_id"),
)
"""The metadata of the newest committed checkpoint of a run, nested names joined by dots."""
