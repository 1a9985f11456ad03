"""Calls of other packages' planners and storages, and their objects on the way between ranks."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from typing import Any

from dcp.ranks.collectives import Codec
from dcp.storage.errors import PlanError

__all__ = ["PICKLED", "call_with_optional", "one_each"]

PICKLED = Codec(pickle.dumps, pickle.loads)
"""Objects of any class, between processes that run the same program."""


def one_each(plans: Sequence[Any], count: int) -> Sequence[Any]:
    """Return a global plan's ``plans`` if ``count`` ranks get one each; PlanError otherwise."""
    if len(plans) != count:
        raise PlanError(f"the global plan has {len(plans)} parts for {count} ranks")
    return plans


def call_with_optional(method: Any, args: tuple[Any, ...], optional: dict[str, Any]) -> None:
    """Call ``method`` with those of the keywords that it takes: torch has added some over time."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        method(*args, **optional)
        return
    method(*args, **{name: value for name, value in optional.items() if name in parameters})
