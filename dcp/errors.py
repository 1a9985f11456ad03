"""The errors of this package; the tree is drawn in `dcp.storage.errors`. Imports without torch."""

from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CollectiveTimeoutError,
    CorruptCheckpointError,
    DtypeMismatchError,
    MissingKeyError,
    PlanError,
    RemoteError,
    ReplicaMismatchError,
    ShapeMismatchError,
    StorageError,
    StorageFullError,
    UnsafeObjectError,
    UnsupportedFormatError,
)

__all__ = [
    "CheckpointConflictError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointNotFoundError",
    "CollectiveTimeoutError",
    "CorruptCheckpointError",
    "DtypeMismatchError",
    "MissingKeyError",
    "PlanError",
    "RemoteError",
    "ReplicaMismatchError",
    "ShapeMismatchError",
    "StorageError",
    "StorageFullError",
    "UnsafeObjectError",
    "UnsupportedFormatError",
]
