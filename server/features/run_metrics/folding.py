"""Metrics of a run in one pass over its checkpoints, and metadata as names and texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from sqlalchemy import Connection, select

from dcp.server.catalog.inputs import short_name
from dcp.server.database.tables import checkpoints, metrics

BY_RUN: Final = "INDEXED BY ix_checkpoints_run_id_step_order_id"
"""For SQLite, which without statistics begins with the checkpoints, or the metrics, of all runs."""
_ROWS: Final = 5_000
MAX_NAMES: Final = 200
_MAX_TEXT: Final = 256
_MAX_LIST: Final = 8


def metrics_of_run(connection: Connection, run_id: int, name: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a run for `tables.run_metrics` from its committed checkpoints; ``name`` selects a
    metric."""
    column = checkpoints.c
    query = (
        select(metrics.c.name, metrics.c.value, column.id, column.step, column.step_order)
        .join_from(checkpoints, metrics, metrics.c.checkpoint_id == column.id)
        .where(column.run_id == run_id, column.state == "committed")
        .with_hint(checkpoints, BY_RUN, "sqlite")
        .execution_options(yield_per=_ROWS)
    )
    if name is not None:
        query = query.where(metrics.c.name == name)
    found: dict[str, dict[str, Any]] = {}
    for metric, value, number, step, order in connection.execute(query):
        one = found.setdefault(metric, {"run_id": run_id, "name": metric, "count": 0, "order": (-2, 0)})
        one["count"] += 1
        if (order, number) > one["order"]:
            one |= {"order": (order, number), "last": value, "last_id": number, "last_step": step}
        if "min" not in one or (value, number) < (one["min"], one["min_id"]):
            one |= {"min": value, "min_id": number, "min_step": step}
        if "max" not in one or (-value, number) < (-one["max"], one["max_id"]):
            one |= {"max": value, "max_id": number, "max_step": step}
    for one in found.values():
        del one["order"]
    return list(found.values())


# -- metadata


def flattened(metadata: Any) -> dict[str, str]:
    """Flatten metadata to names such as ``optimizer.lr``: up to `MAX_NAMES`, texts of up to 256 characters.
    Short lists become one text. Metrics are left out: the catalog stores them separately."""
    if not isinstance(metadata, Mapping):
        return {}
    own = {name: value for name, value in metadata.items() if name != "metrics"}
    return dict(islice(_members("", own), MAX_NAMES))


def _members(start: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from _members(f"{start}.{name}" if start else str(name), value[name])
    elif start:
        yield short_name(start), _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, list) and len(value) > _MAX_LIST:
        return f"{len(value)} items"
    return json.dumps(value, ensure_ascii=False)[:_MAX_TEXT]


def number_of(text: str) -> float | None:
    """Parse a finite number; None for other texts."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None
