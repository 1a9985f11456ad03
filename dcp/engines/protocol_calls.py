"""Calls of planners and storages of other packages, and their objects as messages between ranks."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from typing import Any

from dcp.ranks.collectives import Codec
from dcp.storage.errors import PlanError

__all__ = ["PICKLED", "call_with_optional", "one_each"]

PICKLED = Codec(pickle.dumps, pickle.loads)
"""Codec of any objects, between processes of the same program."""


def one_each(plans: Sequence[Any], count: int) -> Sequence[Any]:
    """Return the ``plans`` of a global plan; PlanError unless there are ``count``."""
    if len(plans) != count:
        raise PlanError(f"the planner's global plan has {len(plans)} plans for {count} ranks")
    return plans


def call_with_optional(method: Any, args: tuple[Any, ...], optional: dict[str, Any]) -> None:
    """Call ``method`` with the keywords that it accepts, which differ between torch versions."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        method(*args, **optional)
        return
    method(*args, **{name: value for name, value in optional.items() if name in parameters})
