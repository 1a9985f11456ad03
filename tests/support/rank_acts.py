"""What tests of ranks that fail or differ share: planners on torch's road, a `Stateful` that acts, and what an
act raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import dcp
from tests.support.processes import busy_seconds

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


def outcome(act: Callable[[], Any]) -> tuple[tuple[str, ...], str, Any, float]:
    """(classes, message, ranks, seconds) of what ``act`` raises; the seconds are those that it waited for
    others, and not for a core of a busy machine."""
    begun = time.monotonic() - busy_seconds()
    try:
        act()
    except dcp.CheckpointError as error:
        names = tuple(cls.__name__ for cls in type(error).__mro__)
        return names, str(error), error.facts.get("ranks"), time.monotonic() - busy_seconds() - begun
    return (), "", None, time.monotonic() - busy_seconds() - begun
