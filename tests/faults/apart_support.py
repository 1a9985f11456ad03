"""What the tests of ranks that differ share: planners on torch's road, and what an act raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import dcp
from tests.support.processes import busy_seconds

STATE = {"w": torch.arange(6.0), "step": 3}


class CustomPlanner(dcp.DefaultLoadPlanner):
    """Takes torch's road, by objects."""

    def create_local_plan(self) -> Any:
        """As its base."""
        return super().create_local_plan()


class CustomSavePlanner(dcp.DefaultSavePlanner):
    """Takes torch's road, by objects."""

    def create_local_plan(self) -> Any:
        """As its base."""
        return super().create_local_plan()


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
