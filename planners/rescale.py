"""State that differs by rank, with the rule that makes it for another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from dcp.planners.per_rank import PerRank
from dcp.storage.errors import CheckpointError, OptionError, PlanError

RescaleRule = Literal["same", "sum", "split", "keep"] | Callable[[list[Any], int, int], Any]
"""From the states of all ranks that saved, to that of one rank of those that load; see `Rescale`."""


@dataclass(slots=True)
class Rescale(PerRank):
    """`PerRank` that says how ``value`` is made for another number of ranks than saved it.

    It is saved as `PerRank` is, and loaded so by as many ranks. By another number of ranks each rank reads
    the states of all that saved, and ``rule`` makes its own of them:

    - "same": they are all equal, and stay so;
    - "sum": numbers and tensors whose sum over the ranks stays what it is, dealt out evenly;
    - "split": lists, or tensors in their first dimension, that are joined in the order of the ranks and cut
      into parts whose lengths differ by one at most;
    - "keep": as it is before the load, such as a generator that begins anew;
    - a function of the list of the states (in the order of the ranks), the rank and the number of ranks.

    "same", "sum" and "split" go through dicts that have the same keys on all ranks. ``per_rank`` of a load
    concerns values without a rule alone. Raises OptionError for what is no rule.
    """

    rule: RescaleRule

    def __post_init__(self) -> None:
        if not callable(self.rule) and self.rule not in (*_RULES, "keep"):
            raise OptionError(
                f'a rule is "same", "sum", "split", "keep" or a function of (states, rank, world_size), '
                f"not {self.rule!r}"
            )


def rescaled_value(name: str, rule: RescaleRule, states: list[Any], rank: int, world_size: int) -> Any:
    """Return what ``rule`` makes of ``states`` for one rank; raises CheckpointError with its ``name``."""
    make = rule if callable(rule) else _RULES[rule]
    try:
        return make(states, rank, world_size)
    except PlanError as error:
        raise PlanError(f"{name!r}: {error}", fqn=name) from error
    except CheckpointError:
        raise
    except Exception as error:  # whatever a user's function raises is raised with the name of the value
        raise CheckpointError(
            f"{name!r} was saved by {len(states)} ranks, and its rule {getattr(rule, '__name__', rule)!r} "
            f"cannot make it for {world_size}: {type(error).__name__}: {error}",
            fqn=name,
        ) from error


def _same(states: list[Any], rank: int, world_size: int) -> Any:
    if not all(_is_equal(states[0], state) for state in states[1:]):
        raise PlanError('a value with the rule "same" differs between the ranks that saved it')
    return states[0]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)


def _sum(states: list[Any], rank: int, world_size: int) -> Any:
    if isinstance(states[0], Mapping):
        return _by_key(_sum, states, rank, world_size)
    if isinstance(states[0], torch.Tensor):
        total = torch.stack(states).sum(0, dtype=states[0].dtype)
        return total / world_size if total.is_floating_point() else _share(total, rank, world_size)
    if any(isinstance(state, bool) or not isinstance(state, int | float) for state in states):
        raise TypeError(f'"sum" is for numbers, tensors and dicts of them, not {states[0]!r}')
    if all(isinstance(state, int) for state in states):
        return _share(sum(states), rank, world_size)
    return math.fsum(states) / world_size


def _share(total: Any, rank: int, world_size: int) -> Any:
    """Return the part of a whole number, or of a tensor of such, that one rank has."""
    return (total + world_size - 1 - rank) // world_size


def _split(states: list[Any], rank: int, world_size: int) -> Any:
    if isinstance(states[0], Mapping):
        return _by_key(_split, states, rank, world_size)
    if isinstance(states[0], torch.Tensor):
        return torch.cat(states).tensor_split(world_size)[rank].clone()
    if not all(isinstance(state, list) for state in states):
        raise TypeError(f'"split" is for lists, tensors and dicts of them, not {states[0]!r}')
    joined = [item for state in states for item in state]
    each, more = divmod(len(joined), world_size)
    begin = rank * each + min(rank, more)
    return joined[begin : begin + each + (rank < more)]


def _by_key(
    rule: Callable[[list[Any], int, int], Any], states: Sequence[Any], rank: int, world_size: int
) -> dict[Any, Any]:
    if any(not isinstance(state, Mapping) or state.keys() != states[0].keys() for state in states):
        raise PlanError("the ranks that saved it have dicts of other keys; give a function as the rule")
    return {key: rule([state[key] for state in states], rank, world_size) for key in states[0]}


_RULES: Final[Mapping[str, Callable[[list[Any], int, int], Any]]] = {
    "same": _same,
    "sum": _sum,
    "split": _split,
}
