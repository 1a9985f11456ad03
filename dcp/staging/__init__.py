"""Staging: copy a state to host memory for asynchronous saves (``torch.distributed.checkpoint.staging``).

`DefaultStager` and `BlockingAsyncStager` are dcp's subclasses of torch's classes. `AsyncStager` and
`StagingOptions` are torch's.
"""

from __future__ import annotations

from torch.distributed.checkpoint.staging import AsyncStager, StagingOptions

from dcp.calls.torch_names import names_of
from dcp.staging.arena import HostArena, StagingMemoryError
from dcp.staging.guard import check_staged, sample_state
from dcp.staging.stager import BlockingAsyncStager, DefaultStager, StagedState, StagingTimeoutError

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

globals()["__getattr__"] = names_of("staging")
