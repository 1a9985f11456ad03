"""Which tensors an optimizer keeps beside which weight, by the names that its state dict is flattened to.

An optimizer is known by its ``param_groups``. What it keeps of a parameter is below ``state`` beside them: by
the parameter's name, as `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` has it, or by its
number, as `Optimizer.state_dict` has it. A number stands for a name where the groups have ``param_names``;
else for a tensor only where order and shapes leave no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from dcp.storage.errors import CheckpointError
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.python_values import decode_value

__all__ = ["KeptState", "OptimizerStates"]

_GROUPS: Final = "param_groups"
_STATE: Final = "state."
_MOST: Final = 64
"""Optimizers that are looked at, so that names by a stranger cost no more."""
_MOST_NAMES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class KeptState:
    """What the optimizer, whose entries begin with ``optimizer``, keeps of one ``parameter``.

    ``states`` are names of entries, by what the optimizer calls them (``exp_avg``). ``weights`` are the
    tensors that it can be: ``by`` "name" all that are called so, or end so; by "order" the one at its place,
    where the optimizer has one group, as many parameters as the model has tensors, and all shapes agree; by
    "nothing" none, and ``parameter`` is a number. ``betas`` are those of Adam and its like; None if they are
    not known, or not the same for all parameters.
    """

    optimizer: str
    parameter: str
    states: Mapping[str, str]
    weights: tuple[str, ...]
    by: Literal["name", "order", "nothing"]
    betas: tuple[float, float] | None


class OptimizerStates:
    """The states of all optimizers in a checkpoint, by its names; none where these are more than a
    million."""

    def __init__(self, index: CheckpointIndex) -> None:
        """``index`` is whole: values of groups that are plain data tell of them."""
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
        """Whether this is an entry of an optimizer, and no weight."""
        return self._optimizer_of(fqn) is not None

    def beside(self, fqn: str) -> list[KeptState]:
        """What is kept of this weight; of a state all that is kept of the same parameter."""
        return [kept for kept in self if fqn in kept.weights or fqn in kept.states.values()]

    def __iter__(self) -> Iterator[KeptState]:
        """All of them, by optimizer."""
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
        """By number; empty unless exactly one part of the checkpoint fits."""
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
    """What the entries of each optimizer begin with: what stands before ``param_groups``."""
    found = set()
    for name in names:
        before, sign, after = name.partition(_GROUPS)
        if sign and (not before or before.endswith(".")) and (not after or after.startswith(".")):
            found.add(before)
    return found


def _groups(index: CheckpointIndex, prefix: str) -> list[dict[str, Any]]:
    """The parameter groups: a list in one value, or flattened, with a value for each member of each."""
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
    """The names by number: where a group says both, in one order."""
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
