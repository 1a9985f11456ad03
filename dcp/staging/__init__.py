"""Copies of state that are saved while training goes on: ``torch.distributed.checkpoint.staging``, and ours.

`DefaultStager` and `BlockingAsyncStager` are ours, subclasses of torch's of those names; the protocol
`AsyncStager` and `StagingOptions` are torch's own. Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dcp.calls.torch_names import names_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import AsyncStager as AsyncStager
    from torch.distributed.checkpoint.staging import StagingOptions as StagingOptions

    from dcp.staging.arena import HostArena as HostArena
    from dcp.staging.arena import StagingMemoryError as StagingMemoryError
    from dcp.staging.guard import check_staged as check_staged
    from dcp.staging.guard import sample_state as sample_state
    from dcp.staging.stager import BlockingAsyncStager as BlockingAsyncStager
    from dcp.staging.stager import DefaultStager as DefaultStager
    from dcp.staging.stager import StagedState as StagedState
    from dcp.staging.stager import StagingTimeoutError as StagingTimeoutError

_MODULES = {
    "BlockingAsyncStager": "dcp.staging.stager",
    "DefaultStager": "dcp.staging.stager",
    "HostArena": "dcp.staging.arena",
    "StagedState": "dcp.staging.stager",
    "StagingMemoryError": "dcp.staging.arena",
    "StagingTimeoutError": "dcp.staging.stager",
    "check_staged": "dcp.staging.guard",
    "sample_state": "dcp.staging.guard",
}

__all__ = [
    "AsyncStager",
    "BlockingAsyncStager",
    "DefaultStager",
    "HostArena",
    "StagedState",
    "StagingMemoryError",
    "StagingOptions",
    "StagingTimeoutError",
    "check_staged",
    "sample_state",
]

if not TYPE_CHECKING:  # a type checker that sees this function takes every misspelt name for a good one

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return getattr(import_module(_MODULES[name]), name)
        return names_of("staging")(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
