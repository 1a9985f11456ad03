"""What tests of ranks share: planners on torch's road, a `Stateful` that acts, and what an act raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dcp

__all__ = ["STATE", "Acting", "ObjectLoadPlanner", "ObjectSavePlanner", "outcome"]

STATE = {"w": torch.arange(6.0), "step": 3}


class ObjectLoadPlanner(dcp.DefaultLoadPlanner):
    """Overrides a step, so that plans travel as torch's objects."""

    def create_local_plan(self) -> Any:
        """As its base."""
        return super().create_local_plan()


class ObjectSavePlanner(dcp.DefaultSavePlanner):
    """The same of saves."""

    def create_local_plan(self) -> Any:
        """As its base."""
        return super().create_local_plan()


class Acting:
    """A `Stateful` that does something when it is asked for its state, of which it has none."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, Any]:
        """Act."""
        self.act()
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to take."""


def outcome(act: Callable[[], Any]) -> tuple[tuple[str, ...], str, Any]:
    """(classes, message, ranks) of what ``act`` raises."""
    try:
        act()
    except dcp.CheckpointError as error:
        return tuple(cls.__name__ for cls in type(error).__mro__), str(error), error.facts.get("ranks")
    return (), "", None
