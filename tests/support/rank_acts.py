"""Helpers of rank tests: planners for the torch protocol, an acting `Stateful`, and raised errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

import dcp
from tests.support.fault_doors import Fault, OpenWithFaults
from tests.support.versions import version_state

__all__ = [
    "STATE",
    "Acting",
    "ObjectLoadPlanner",
    "ObjectSavePlanner",
    "act_in_phase",
    "outcome",
    "warned",
]

STATE = {"w": torch.arange(6.0), "step": 3}


class ObjectLoadPlanner(dcp.DefaultLoadPlanner):
    """A load planner that overrides a step, so that plans travel as torch's objects."""

    def create_local_plan(self) -> Any:
        """Create the plan of the base class."""
        return super().create_local_plan()


class ObjectSavePlanner(dcp.DefaultSavePlanner):
    """A save planner that overrides a step, so that plans travel as torch's objects."""

    def create_local_plan(self) -> Any:
        """Create the plan of the base class."""
        return super().create_local_plan()


class Acting:
    """A `Stateful` without state that calls a function when asked for its state."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, Any]:
        """Call the function."""
        self.act()
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state."""


@contextmanager
def warned() -> Iterator[list[str]]:
    """Record the package's log within the block on this rank."""
    messages, handler, logger = list[str](), logging.Handler(logging.WARNING), logging.getLogger("dcp")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def outcome(act: Callable[[], Any]) -> tuple[tuple[str, ...], str, Any]:
    """Return (classes, message, ranks) of the exception raised by ``act``."""
    try:
        act()
    except dcp.CheckpointError as error:
        return tuple(cls.__name__ for cls in type(error).__mro__), str(error), error.facts.get("ranks")
    return (), "", None


_OPERATIONS: Final = {
    "prepare": "make_root",
    "index": "read",
    "open": "open_read",
    "read": "preadv",
    **{name: name for name in ("write", "finish", "sync", "lock", "publish")},
}
"""Phases that begin with an operation on the store; the others are methods of planners."""


def act_in_phase(
    folder: Path,
    phase: str,
    act: Callable[..., None] | None,
    *,
    version: int = 0,
    by_objects: bool = False,
    timeout_seconds: float = 60.0,
    **more: Any,
) -> None:
    """Save ``version``, or load if it is 0, with ``more`` in the state. Ranks with an ``act`` call it in the
    phase ``phase``. ``by_objects``: use torch's protocol."""
    state: dict[str, Any] = version_state(version) | more
    by_columns: Any = dcp.DefaultSavePlanner if version else dcp.DefaultLoadPlanner
    planner, faults = by_columns(), []
    if by_objects:
        planner = ObjectSavePlanner() if version else ObjectLoadPlanner()
    if act is not None and phase == "state_dict":
        state["acts"] = Acting(act)
    elif act is not None and phase in _OPERATIONS:
        faults = [Fault(_OPERATIONS[phase], hook=act)]
    elif act is not None:
        planner = type("ActingPlanner", (by_columns,), {phase: act})()
    given: dict[str, Any] = {"planner": planner, "timeout_seconds": timeout_seconds}
    opener = OpenWithFaults(*faults)
    if version:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, open_store=opener), **given)
    else:
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder, open_store=opener), **given)
