"""A tensor in the checkpoints of its run around one step."""

from __future__ import annotations

import math
from typing import Any, Final
from urllib.parse import urlencode

from dcp.server.catalog.queries.filters import CheckpointFilter, Sort
from dcp.server.catalog.queries.listing import list_checkpoints
from dcp.server.core.ask import Ask
from dcp.server.core.pages.drawing import polyline
from dcp.server.core.pages.marks import largest_of, mark_of
from dcp.server.core.problems import ProblemError
from dcp.server.features.statistics.web import kept_statistics
from dcp.server.features.tensors import feature
from dcp.server.features.tensors.reading import SMALL_BYTES, NamedDep, NamedTensor, statistics_of
from dcp.server.records.checkpoints import Checkpoint
from dcp.server.records.drawings import TensorStatistics

_SMALL_COUNT: Final = 2_000
"""Tensors of checkpoints whose indexes open quickly enough to read one for each step."""
_STEPS: Final = 24


@feature.page("/checkpoints/{checkpoint_id}/tensors/steps", "steps.html")
def steps_page(named: NamedDep, ask: Ask) -> dict[str, Any]:
    """The tensor in neighbouring checkpoints, with what is known of its values there."""
    rows: list[tuple[Checkpoint, Any, float | None, Any]] = []
    for one in _around(named, ask):
        found = _values_at(one, named, ask)
        values = None if found is None else found.statistics
        if found is None or values is None:
            rows.append((one, None, None, None))
        else:
            rows.append((one, values, largest_of(values), mark_of(found.dtype, values)))
    query = {"run_id": named.found.run_id, "tensor": named.fqn, "sort": "step"}
    known = [(values, largest) for _, values, largest, _ in rows if values is not None]
    return {
        "twin": f"/api/v1/checkpoints?{urlencode(query)}" if named.is_plain else named.twin,
        "named": named,
        "found": named.found,
        "rows": rows,
        "norms": polyline([values["norm"] for values, _ in known if values["norm"] is not None]),
        "largest": polyline([one for _, one in known if one is not None and math.isfinite(one)]),
        "known": len(known),
    }


def _values_at(one: Checkpoint, named: NamedTensor, ask: Ask) -> TensorStatistics | None:
    """The statistics that a job has computed; of a small tensor in a small checkpoint those as it is now."""
    if named.stored_bytes > SMALL_BYTES or (named.found.tensor_count or 0) > _SMALL_COUNT:
        return kept_statistics(ask, one.id, named.of.fqn)
    try:
        return statistics_of(ask, ask.data.open(one.id), named.of.fqn, SMALL_BYTES)
    except ProblemError:  # the page of that checkpoint shows it
        return None


def _around(named: NamedTensor, ask: Ask) -> list[Checkpoint]:
    """Checkpoints by step, this one among them."""
    step = named.found.step
    if step is None or not named.is_plain:
        return [named.found]
    later = _listed(named, ask, "step", min_step=step)
    return [*_listed(named, ask, "-step", max_step=step - 1)[::-1], *later] if step else later


def _listed(named: NamedTensor, ask: Ask, order: str, **steps: int) -> list[Checkpoint]:
    states = frozenset({"committed"})
    wanted = CheckpointFilter(run_id=named.found.run_id, tensor=named.fqn, states=states, **steps)  # type: ignore[arg-type]
    sort = Sort.parse(order)
    return ask.find(list_checkpoints, wanted, sort, limit=_STEPS // 2, visible=ask.visible).checkpoints
