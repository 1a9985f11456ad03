"""The ways through a load, and objects with state, for tests that try each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as stock

import dcp

__all__ = ["ROADS", "Part", "TakesObjects", "load", "told"]

ROADS = ["columns", "objects", "foreign reader"]


class TakesObjects(dcp.DefaultLoadPlanner):
    """Overrides a step, and so gets torch's objects."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """As ever."""
        super().commit_tensor(read_item, tensor)


def load(state: dict[str, Any], path: Any, road: str = "columns", **options: Any) -> dcp.LoadReport:
    """`dcp.load` by one of the ways through it."""
    if road == "objects":
        options["planner"] = TakesObjects()
    if road == "foreign reader":
        options["storage_reader"] = stock.FileSystemReader(path)
    else:
        options["checkpoint_id"] = path
    report: dcp.LoadReport = dcp.load(state, **options)
    return report


class Part:
    """A `Stateful` that counts how often it is asked and given."""

    def __init__(self, **state: Any) -> None:
        self.state: Any = state
        self.asked = 0
        self.given: list[dict[str, Any]] = []

    def state_dict(self) -> Any:
        """The state itself."""
        self.asked += 1
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Take it, and remember it."""
        self.state = state
        self.given.append(state)


def told(act: Callable[[], Any]) -> str:
    """Class and message of the error that a call raises, for which no rank has to end; "" for none."""
    try:
        act()
    except dcp.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""
