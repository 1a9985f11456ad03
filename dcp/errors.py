"""Exceptions of dcp, importable without torch. `dcp.storage.errors` shows the class hierarchy.

`RankFailedError` needs torch and is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dcp.storage import errors as _errors
from dcp.storage.errors import *  # noqa: F403 - all of them

if TYPE_CHECKING:
    from dcp.ranks.failures import RankFailedError as RankFailedError
else:

    def __getattr__(name: str) -> object:
        if name != "RankFailedError":
            raise AttributeError(f"module 'dcp.errors' has no attribute {name!r}")
        return import_module("dcp.ranks.failures").RankFailedError


__all__: list[str] = []
__all__ += _errors.__all__
