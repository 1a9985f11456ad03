"""The errors of this package; the tree is drawn in `dcp.storage.errors`. Imports without torch.

`RankFailedError`, which needs torch, is imported when it is asked for by name.
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
