"""Calls of features, whose errors have the feature's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp.storage.errors import CheckpointError

__all__ = ["ask", "refused"]


def ask(name: str, method: str, function: Callable[..., Any], kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, the ``method`` of the feature ``name``, and return its result, which must be a
    ``kind``.

    What is no error of this package is raised as a CheckpointError that has the name, and so is a result of
    another type.
    """
    try:
        result = function(*args, **kwargs)
    except CheckpointError:
        raise
    except Exception as error:
        raise refused(name, method, f"{type(error).__name__}: {error}") from error
    if not isinstance(result, kind):
        wanted = getattr(kind, "__name__", str(kind))
        raise refused(name, method, f"it returned {type(result).__name__}, and {wanted} is wanted")
    return result


def refused(name: str, method: str, why: str) -> CheckpointError:
    """Make the error for what the ``method`` of the feature ``name`` did."""
    return CheckpointError(f"feature {name!r}, {method}: {why}")
