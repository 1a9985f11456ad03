"""Calls of other packages' planners and storages, and their objects on the way between ranks."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

from dcp.ranks.collectives import Codec

__all__ = ["PICKLED", "call_with_optional"]

PICKLED = Codec(pickle.dumps, pickle.loads)
"""Objects of any class, between processes that run the same program."""


def call_with_optional(method: Any, args: tuple[Any, ...], optional: dict[str, Any]) -> None:
    """Call ``method`` with those of the keywords that it takes: torch has added some over time."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        method(*args, **optional)
        return
    method(*args, **{name: value for name, value in optional.items() if name in parameters})
