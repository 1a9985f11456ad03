"""The errors of this package; the tree is drawn in `dcp.storage.errors`. Imports without torch.

`RankFailedError`, which needs torch, is imported when it is asked for by name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CollectiveTimeoutError,
    CorruptCheckpointError,
    DtypeMismatchError,
    MissingKeyError,
    OptionError,
    PlanError,
    RemoteError,
    ReplicaMismatchError,
    SaveAbortedError,
    ShapeMismatchError,
    StagingError,
    StorageError,
    StorageFullError,
    UnexpectedKeyError,
    UnsafeObjectError,
    UnsupportedFormatError,
    WriterProcessError,
)

if TYPE_CHECKING:
    from dcp.ranks.exchanges import RankFailedError as RankFailedError
else:

    def __getattr__(name: str) -> object:
        if name != "RankFailedError":
            raise AttributeError(f"module 'dcp.errors' has no attribute {name!r}")
        return import_module("dcp.ranks.exchanges").RankFailedError


__all__ = [
    "CheckpointConflictError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointNotFoundError",
    "CollectiveTimeoutError",
    "CorruptCheckpointError",
    "DtypeMismatchError",
    "MissingKeyError",
    "OptionError",
    "PlanError",
    "RemoteError",
    "ReplicaMismatchError",
    "SaveAbortedError",
    "ShapeMismatchError",
    "StagingError",
    "StorageError",
    "StorageFullError",
    "UnexpectedKeyError",
    "UnsafeObjectError",
    "UnsupportedFormatError",
    "WriterProcessError",
]
