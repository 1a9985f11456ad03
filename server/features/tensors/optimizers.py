"""Optimizer states: tensors of an optimizer by weight, from the names of its state dict.

``param_groups`` identify an optimizer. The states of a parameter are below ``state``: by the parameter's
name, as in `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, or by number, as in
`Optimizer.state_dict`. A number maps to a name if the groups have ``param_names``, and to a tensor only if
order and shapes allow a single choice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

from dcp.server.features.tensors import Mark, mark_of, rms_of
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.python_values import decode_value

_GROUPS: Final = "param_groups"
_STATE: Final = "state."
_MOST: Final = 64
"""Maximum number of optimizers, to bound the cost of hostile names."""
_MOST_NAMES: Final = 1_000_000
_ROWS: Final = 16
_READ_ROWS: Final = 6
"""Read rows: a weight and the states of Adam-like optimizers; others are only looked up, to bound the cost of
names that match thousands of tensors."""

ValuesOf = Callable[[str, bool], Mapping[str, Any] | None]
"""Statistics of a tensor, from a job or read now if allowed; None if unknown."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """States of a ``parameter`` in the optimizer with entries below ``optimizer``.

    ``states``: entry names by state (``exp_avg``). ``weights``: candidate tensors of the parameter. ``by``
    "name": tensors with the parameter's name, or a name with this ending. ``by`` "order": the tensor at its
    position, if the optimizer has one group, as many parameters as the model has tensors, and equal shapes.
    ``by`` "nothing": none, and ``parameter`` is a number. ``betas``: those of Adam-like optimizers; None if
    unknown or different between parameters.
    """

    optimizer: str
    parameter: str
    states: Mapping[str, str]
    weights: tuple[str, ...]
    by: Literal["name", "order", "nothing"]
    betas: tuple[float, float] | None


class OptimizerStates:
    """States of all optimizers in a checkpoint, by name; empty above a million states."""

    def __init__(self, index: CheckpointIndex) -> None:
        """Read the states; ``index`` must be whole, with the plain values of the groups."""
        self._index = index
        is_small = len(index.fqns) + len(index.objects) <= _MOST_NAMES
        names = [*index.fqns, *index.objects.fqns] if is_small else []
        self._prefixes = tuple(sorted(sorted(_prefixes(names))[:_MOST], key=len, reverse=True))
        self._groups = {prefix: _groups(index, prefix) for prefix in self._prefixes}
        self._names = {prefix: _names(groups) for prefix, groups in self._groups.items()}
        self._kept: dict[str, dict[str, dict[str, str]]] = {}
        for name in names:
            self._keep(name)
        self._weights = self._weights_by_name()

    def is_state(self, fqn: str) -> bool:
        """Return True for an entry of an optimizer."""
        return self._optimizer_of(fqn) is not None

    def beside(self, fqn: str) -> list[KeptState]:
        """Return the states of this weight; for a state, all states of the parameter."""
        return [kept for kept in self if fqn in kept.weights or fqn in kept.states.values()]

    def __iter__(self) -> Iterator[KeptState]:
        """Yield all states by optimizer."""
        for prefix, parameters in self._kept.items():
            in_order, betas = self._weights_by_order(prefix), _betas(self._groups[prefix])
            for parameter, states in parameters.items():
                name = self._names[prefix].get(parameter, parameter)
                if not name.isdecimal():
                    yield KeptState(prefix, name, states, tuple(self._weights.get(name, ())), "name", betas)
                elif parameter in in_order:
                    yield KeptState(prefix, parameter, states, (in_order[parameter],), "order", betas)
                else:
                    yield KeptState(prefix, parameter, states, (), "nothing", betas)

    def _optimizer_of(self, name: str) -> str | None:
        found = (prefix for prefix in self._prefixes if name.startswith(prefix))
        return next((prefix for prefix in found if name.startswith((_STATE, _GROUPS), len(prefix))), None)

    def _keep(self, name: str) -> None:
        prefix = self._optimizer_of(name)
        if prefix is not None and name.startswith(_STATE, len(prefix)):
            parameter, _, state = name[len(prefix) + len(_STATE) :].rpartition(".")
            self._kept.setdefault(prefix, {}).setdefault(parameter, {})[state] = name

    def _weights_by_name(self) -> dict[str, list[str]]:
        wanted = {name for of_each in self._kept.values() for name in of_each}
        wanted |= {name for of_each in self._names.values() for name in of_each.values()}
        found: dict[str, list[str]] = defaultdict(list)
        for fqn in self._index.fqns if wanted else ():
            end = "" if self.is_state(fqn) else fqn
            while end:
                if end in wanted:
                    found[end].append(fqn)
                end = end.partition(".")[2]
        return found

    def _weights_by_order(self, prefix: str) -> dict[str, str]:
        """Return the weights by number; empty unless exactly one part of the checkpoint fits."""
        groups = self._groups[prefix]
        numbers = groups[0].get("params") if len(groups) == 1 else None
        if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
            return {}
        parts: dict[str, list[str]] = defaultdict(list)
        for fqn in self._index.fqns:
            if not self.is_state(fqn):
                parts[fqn.partition(".")[0]].append(fqn)
        tried = [
            dict(zip(map(str, numbers), part, strict=False))
            for part in parts.values()
            if len(part) == len(numbers)
        ]
        fitting = [weights for weights in tried if self._fit(prefix, weights)]
        return fitting[0] if len(fitting) == 1 else {}

    def _fit(self, prefix: str, weights: Mapping[str, str]) -> bool:
        for parameter, states in self._kept[prefix].items():
            shapes = {shape for name in states.values() if len(shape := self._shape(name)) > 0}
            if parameter not in weights or not shapes <= {self._shape(weights[parameter])}:
                return False
        return True

    def _shape(self, fqn: str) -> tuple[int, ...]:
        row = self._index.position.get(fqn)
        return () if row is None else self._index.shape(row)


def _prefixes(names: Iterable[str]) -> set[str]:
    """Return the prefixes of the entries of optimizers: the text before ``param_groups``."""
    found = set()
    for name in names:
        before, sign, after = name.partition(_GROUPS)
        if sign and (not before or before.endswith(".")) and (not after or after.startswith(".")):
            found.add(before)
    return found


def _groups(index: CheckpointIndex, prefix: str) -> list[dict[str, Any]]:
    """Return the parameter groups, stored as a list in one value, or flattened with a value per member."""
    begin = f"{prefix}{_GROUPS}"
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for place, name in enumerate(index.objects.fqns):
        if name == begin:
            whole = _plain(index, place)
            return [group for group in whole if isinstance(group, dict)] if isinstance(whole, list) else []
        if name.startswith(begin + "."):
            number, _, member = name[len(begin) + 1 :].rpartition(".")
            if member in ("params", "param_names", "betas"):
                groups[number][member] = _plain(index, place)
            else:
                groups[number].setdefault(member, None)
    return list(groups.values())


def _names(groups: list[dict[str, Any]]) -> dict[str, str]:
    """Return names by number for groups with both."""
    found: dict[str, str] = {}
    for group in groups:
        numbers, names = group.get("params"), group.get("param_names")
        if isinstance(numbers, list) and isinstance(names, list) and len(numbers) == len(names):
            found.update({str(n): str(name) for n, name in zip(numbers, names, strict=True)})
    return found


def _betas(groups: list[dict[str, Any]]) -> tuple[float, float] | None:
    found = {
        tuple(given) if isinstance(given := group.get("betas"), list | tuple) else () for group in groups
    }
    betas = found.pop() if len(found) == 1 else ()
    is_pair = len(betas) == 2 and all(isinstance(one, float) and 0 <= one < 1 for one in betas)
    return (betas[0], betas[1]) if is_pair else None


def _plain(index: CheckpointIndex, place: int) -> Any:
    at = int(index.objects.plain[place])
    if at == UNKNOWN:
        return None
    try:
        return decode_value(index.objects.values[at])
    except CheckpointError:
        return None


# -- panels --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Weight or state. ``values``: statistics, or None if unknown."""

    state: str | None
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    values: Mapping[str, Any] | None
    mark: Mark | None


@dataclass(frozen=True, slots=True)
class Panel:
    """Parameter with its states. ``gradient_rms``: from the second moment; ``alike``: share of the first
    moment; None if unknown. ``is_corrected``: bias of both was removed."""

    kept: KeptState
    rows: tuple[PanelRow, ...]
    gradient_rms: float | None
    weight_rms: float | None
    alike: float | None = None
    is_corrected: bool = False


def panel_of(kept: KeptState, index: CheckpointIndex, values_of: ValuesOf) -> Panel:
    """Return the panel of a parameter."""
    names: Iterable[tuple[str | None, str]] = [*((None, fqn) for fqn in kept.weights), *kept.states.items()]
    rows: list[PanelRow] = []
    for state, fqn in islice(names, _ROWS):
        if fqn in index.position:
            row = index.position[fqn]
            dtype, values = index.dtype(row).name, values_of(fqn, len(rows) < _READ_ROWS)
            rows.append(PanelRow(state, fqn, dtype, index.shape(row), values, mark_of(dtype, values)))
    states = {row.state: row.values for row in rows if row.state is not None}
    weights = [row.values for row in rows if row.state is None]
    return _with_moments(kept, tuple(rows), states, weights[0] if len(weights) == 1 else None)


def _with_moments(
    kept: KeptState, rows: tuple[PanelRow, ...], states: Mapping[str, Any], weight: Mapping[str, Any] | None
) -> Panel:
    """Return the panel with the root mean squares of gradient and weight, and the share of the gradient with
    a stable direction.

    Corrects the bias of the moments as Adam (Kingma and Ba, 2015, algorithm 1) if the step is known;
    otherwise the moments cannot be compared.
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
