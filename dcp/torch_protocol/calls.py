"""Calls of planners and storages from before torch added keywords."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["call_with_optional"]


def call_with_optional(method: Any, args: tuple[Any, ...], optional: dict[str, Any]) -> None:
    """Call ``method`` with those of the keywords that it takes."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        method(*args, **optional)
        return
    method(*args, **{name: value for name, value in optional.items() if name in parameters})
