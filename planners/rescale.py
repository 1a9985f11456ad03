"""State that differs by rank, with a rule for another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from dcp.planners.per_rank import PerRank
from dcp.storage.errors import CheckpointError, OptionError, PlanError

RescaleRule = Literal["same", "sum", "split", "keep"] | Callable[[list[Any], int, int], Any]
"""Function from the saved states of all ranks to the state of a loading rank; see `Rescale`."""


@dataclass(slots=True)
class Rescale(PerRank):
    """`PerRank` with a ``rule`` for loading on another number of ranks.

    Saved like `PerRank`, and loaded like it on the same number of ranks. On another number, each rank reads
    the states of all saving ranks and ``rule`` computes its state:

    - "same": the states are equal, and stay equal;
    - "sum": numbers and tensors with a constant sum over the ranks, distributed evenly;
    - "split": lists, or tensors along the first dimension, joined in rank order and cut into parts whose
      lengths differ by at most one;
    - "keep": keep the present value, for example of a generator that starts over;
    - a function of the list of states (in rank order), the rank and the number of ranks.

    "same", "sum" and "split" apply to dicts with equal keys on all ranks, item by item. ``per_rank`` of a
    load affects only values without a rule.

    Raises:
        OptionError: For an invalid rule.

    Examples:
        state = {"samples_seen": dcp.Rescale(1024, "sum"), "pending": dcp.Rescale(queue, "split")}
    """

    rule: RescaleRule

    def __post_init__(self) -> None:
        if not callable(self.rule) and self.rule not in (*_RULES, "keep"):
            raise OptionError(
                f'the rule of Rescale must be "same", "sum", "split", "keep" or a function of (states, rank, '
                f"world_size), not {self.rule!r}"
            )


def rescaled_value(name: str, rule: RescaleRule, states: list[Any], rank: int, world_size: int) -> Any:
    """Apply ``rule`` to ``states`` for one rank; raises CheckpointError with ``name``."""
    make = rule if callable(rule) else _RULES[rule]
    try:
        return make(states, rank, world_size)
    except PlanError as error:
        raise PlanError(f"{name!r}: {error}", fqn=name) from error
    except CheckpointError:
        raise
    except Exception as error:  # raised by the user's function
        raise CheckpointError(
            f"{name!r} was saved by {len(states)} ranks, and its rule {getattr(rule, '__name__', rule)!r} "
            f"fails for {world_size} ranks: {type(error).__name__}: {error}",
            fqn=name,
        ) from error


def _same(states: list[Any], rank: int, world_size: int) -> Any:
    if not all(_is_equal(states[0], state) for state in states[1:]):
        raise PlanError('the rule is "same", but the value differs between the saving ranks')
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
        raise TypeError(
            f'the rule "sum" supports numbers, tensors and dicts of these, not {states[0]!r:.200}'
        )
    if all(isinstance(state, int) for state in states):
        return _share(sum(states), rank, world_size)
    return math.fsum(states) / world_size


def _share(total: Any, rank: int, world_size: int) -> Any:
    """Return a rank's share of an integer, or of a tensor of integers."""
    return (total + world_size - 1 - rank) // world_size


def _split(states: list[Any], rank: int, world_size: int) -> Any:
    if isinstance(states[0], Mapping):
        return _by_key(_split, states, rank, world_size)
    if isinstance(states[0], torch.Tensor):
        return torch.cat(states).tensor_split(world_size)[rank].clone()
    if not all(isinstance(state, list) for state in states):
        raise TypeError(
            f'the rule "split" supports lists, tensors and dicts of these, not {states[0]!r:.200}'
        )
    joined = [item for state in states for item in state]
    each, more = divmod(len(joined), world_size)
    begin = rank * each + min(rank, more)
    return joined[begin : begin + each + (rank < more)]


def _by_key(
    rule: Callable[[list[Any], int, int], Any], states: Sequence[Any], rank: int, world_size: int
) -> dict[Any, Any]:
    if any(not isinstance(state, Mapping) or state.keys() != states[0].keys() for state in states):
        raise PlanError("the saving ranks have dicts with different keys: use a function as the rule")
    return {key: rule([state[key] for state in states], rank, world_size) for key in states[0]}


_RULES: Final[Mapping[str, Callable[[list[Any], int, int], Any]]] = {
    "same": _same,
    "sum": _sum,
    "split": _split,
}
