"""State dicts of optimizers within a state dict, known by what torch keeps there: state and param_groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dcp.planners.flatten import MAPPING, kind_of

__all__ = ["optimizer_dicts", "prefixes_without_state"]

_NESTED = 16
"""Levels down to which they are looked for; a dict may hold itself."""


def optimizer_dicts(
    state: Mapping[Any, Any], prefix: str, depth: int = _NESTED
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """(what the flat keys of its entries begin with, state dict of an optimizer), of ``state`` or below it.

    ``prefix`` is what the flat keys of the entries of ``state`` begin with.
    """
    is_optimizer = "state" in state and isinstance(state.get("param_groups"), list)
    if is_optimizer:
        yield prefix, state
    elif all(kind_of(cls) != MAPPING for cls in set(map(type, state.values()))):
        return  # quick, for a model of many tensors
    if not depth:
        return
    for key, value in state.items():
        if kind_of(type(value)) == MAPPING and not (is_optimizer and key == "state"):
            yield from optimizer_dicts(value, f"{prefix}{key}.", depth - 1)


def prefixes_without_state(state: Mapping[Any, Any]) -> tuple[str, ...]:
    """What flat keys of the state of parameters begin with, of optimizers in ``state`` that have parameters
    and no state of any."""
    return tuple(
        f"{prefix}state.{parameter}."
        for prefix, optimizer in optimizer_dicts(state, "")
        if isinstance(optimizer["state"], Mapping) and not optimizer["state"]
        for group in optimizer["param_groups"]
        if isinstance(group, Mapping) and isinstance(group.get("params"), list)
        for parameter in group["params"]
        if isinstance(parameter, str | int)
    )
