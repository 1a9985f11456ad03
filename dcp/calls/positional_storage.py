"""Calls as they were before torch 2.2, with the storage as the second positional argument."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from dcp.calls.plain_errors import warn_caller
from dcp.storage.errors import OptionError

__all__ = ["refuse_a_place", "takes_storage_second"]

P = ParamSpec("P")
R = TypeVar("R")


def takes_storage_second(argument: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that makes of a second positional argument the keyword ``argument``, with torch's warning.

    Raises PlanError where a place is given as the state dict.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            refuse_a_place(name, args[0] if args else kwargs.get("state_dict"))
            if len(args) == 2 and argument not in kwargs:
                warn_caller(
                    f"The argument order of {name} has been changed. Please check the document to avoid "
                    "future breakages."
                )
                return cast("Callable[..., R]", function)(args[0], **kwargs, **{argument: args[1]})
            return cast("Callable[..., R]", function)(*args, **kwargs)

        return cast("Callable[P, R]", call)

    return decorate


def refuse_a_place(function: str, state_dict: object) -> None:
    """Raise PlanError if the state dict that ``function`` was given is a place."""
    if isinstance(state_dict, str | bytes | os.PathLike):
        raise OptionError(
            f"{function} takes the state dict first, and {state_dict!r} is a place: "
            f"dcp.{function}(state_dict, checkpoint_id={state_dict!r})"
        )
