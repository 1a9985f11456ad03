"""Panels of a parameter: the weight beside the states that an optimizer keeps of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from dcp.server.core.ask import Ask
from dcp.server.core.pages.marks import Mark, mark_of, rms_of
from dcp.server.core.problems import ProblemError
from dcp.server.features.tensors.reading import NamedTensor, statistics_of

if TYPE_CHECKING:
    from dcp.server.features.tensors.optimizer_states import KeptState

__all__ = ["panel_of"]

_ROWS: Final = 16
_READ_ROWS: Final = 6
"""A weight and the states of Adam and the like; others are only looked up, so that names which fit thousands
of tensors cost no more."""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A weight or a state. ``values``: its statistics; None if they are not known."""

    state: str | None
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    values: Mapping[str, Any] | None
    mark: Mark | None


@dataclass(frozen=True, slots=True)
class Panel:
    """A parameter with its states. ``gradient_rms`` is of the second moment, ``alike`` the share of the first
    moment in it; None where they are not known. ``is_corrected``: without the bias of both."""

    kept: KeptState
    rows: tuple[PanelRow, ...]
    gradient_rms: float | None
    weight_rms: float | None
    alike: float | None = None
    is_corrected: bool = False


def panel_of(kept: KeptState, named: NamedTensor, ask: Ask, most_bytes: int) -> Panel:
    """The panel of one parameter; tensors of more than ``most_bytes`` are not read."""
    names: Iterable[tuple[str | None, str]] = [*((None, fqn) for fqn in kept.weights), *kept.states.items()]
    rows: list[PanelRow] = []
    for state, fqn in islice(names, _ROWS):
        if fqn in named.readable.opened.index.position:
            rows.append(_row(state, fqn, named, ask, most_bytes if len(rows) < _READ_ROWS else 0))
    states = {row.state: row.values for row in rows if row.state is not None}
    weights = [row.values for row in rows if row.state is None]
    return _with_moments(kept, tuple(rows), states, weights[0] if len(weights) == 1 else None)


def _row(state: str | None, fqn: str, named: NamedTensor, ask: Ask, most_bytes: int) -> PanelRow:
    index = named.readable.opened.index
    try:
        found = statistics_of(ask, named.readable, fqn, most_bytes)
    except ProblemError:
        found = None
    values = None if found is None else found.statistics
    row = index.position[fqn]
    dtype = index.dtype(row).name
    return PanelRow(state, fqn, dtype, index.shape(row), values, mark_of(dtype, values))


def _with_moments(
    kept: KeptState, rows: tuple[PanelRow, ...], states: Mapping[str, Any], weight: Mapping[str, Any] | None
) -> Panel:
    """The panel with the root mean squares of gradient and weight, and the share of the gradient that keeps
    its direction.

    The bias of the moments is corrected as Adam does it (Kingma and Ba, 2015, algorithm 1), where its step is
    known; without that the moments cannot be compared.
    """
    first, second, step = (states.get(name) for name in ("exp_avg", "exp_avg_sq", "step"))
    weight_rms = None if weight is None else rms_of(weight)
    if second is not None and second["nans"] + second["infs"]:
        return Panel(kept, rows, math.nan if second["nans"] else math.inf, weight_rms)
    if second is None or second["mean"] is None or second["mean"] < 0:
        return Panel(kept, rows, None, weight_rms)
    steps = step["min"] if step is not None and step["count"] == 1 else None
    if kept.betas is None or not steps or steps < 1:
        return Panel(kept, rows, math.sqrt(second["mean"]), weight_rms)
    biases = [1 - beta**steps for beta in kept.betas]
    gradient = math.sqrt(second["mean"] / biases[1])
    own = None if first is None else rms_of(first)
    alike = own / biases[0] / gradient if own is not None and gradient else None
    return Panel(kept, rows, gradient, weight_rms, alike, is_corrected=True)
