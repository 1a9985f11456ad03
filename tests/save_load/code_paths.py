"""Code paths of a load, and a `Stateful`, for tests that try each path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as stock

import dcp

__all__ = ["CODE_PATHS", "Part", "TakesObjects", "error_of", "load"]

CODE_PATHS = ["columns", "objects", "foreign reader"]


class TakesObjects(dcp.DefaultLoadPlanner):
    """A planner that overrides a step, and therefore receives torch's objects."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """Call the default step."""
        super().commit_tensor(read_item, tensor)


def load(state: dict[str, Any], path: Any, code_path: str = "columns", **options: Any) -> dcp.LoadReport:
    """Load with `dcp.load` by one of its code paths."""
    if code_path == "objects":
        options["planner"] = TakesObjects()
    if code_path == "foreign reader":
        options["storage_reader"] = stock.FileSystemReader(path)
    else:
        options["checkpoint_id"] = path
    report: dcp.LoadReport = dcp.load(state, **options)
    return report


class Part:
    """A `Stateful` that counts calls of `state_dict`, and records the states it is given."""

    def __init__(self, **state: Any) -> None:
        self.state: Any = state
        self.asked = 0
        self.given: list[dict[str, Any]] = []

    def state_dict(self) -> Any:
        """Return the state."""
        self.asked += 1
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Take the state, and record it."""
        self.state = state
        self.given.append(state)


def error_of(act: Callable[[], Any]) -> str:
    """Return class and message of the CheckpointError that a call raises; "" without an error."""
    try:
        act()
    except dcp.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""
