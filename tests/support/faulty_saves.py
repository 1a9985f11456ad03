"""States saved to and loaded from an S3 server, and a store that cannot write a file: for tests of faults."""

from __future__ import annotations

from typing import Any

import torch

import dcp
from dcp.errors import StorageError
from dcp.storage.stores import PosixStore, Store
from tests.support.fault_doors import METADATA_NAME, Fault, FaultInjectingStore
from tests.support.values import full_tensor, raw

__all__ = [
    "PART_BYTES",
    "assert_loads",
    "impatient",
    "patient",
    "small_state",
    "state_of",
    "without_metadata",
]

PART_BYTES = 5 << 20
"""The smallest part size that S3 accepts."""


def state_of(name: str) -> dict[str, Any]:
    """Return 45 tensors with bytes determined by ``name``; one tensor is larger than a part."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "big": ((6, 1 << 18), torch.float32),
        "empty": ((0, 3), torch.float32),
        "scalar": ((), torch.float64),
        "odd": ((7, 13, 3), torch.int8),
        "flags": ((1001,), torch.bool),
    }
    shapes |= {f"layer.{n}": ((64 + n, 50), torch.bfloat16) for n in range(40)}
    return {key: full_tensor(f"{name}/{key}", *kind) for key, kind in shapes.items()} | {"note": name}


def small_state(name: str) -> dict[str, Any]:
    """Return a state that fits into one request."""
    return {"weight": full_tensor(name, (100, 100), torch.float32), "note": name}


def assert_loads(url: str, expected: dict[str, Any], options: dict[str, Any]) -> None:
    """Load into other contents, and compare every byte."""
    state: dict[str, Any] = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in expected.items()
    }
    dcp.load(state, checkpoint_id=url, storage_options=options, no_dist=True)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert raw(state[key]) == raw(value), f"{key} differs"
        else:
            assert state[key] == value


def patient(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a job that must survive faults."""
    return {**options, "part_bytes": PART_BYTES, "retry_seconds": 120.0, "request_timeout_seconds": 30.0}


def impatient(options: dict[str, Any], *, request_timeout_seconds: float = 30.0) -> dict[str, Any]:
    """Return options of a job that gives up soon, but waits for answers within the timeout."""
    patience = {"retry_seconds": 0.1, "request_timeout_seconds": request_timeout_seconds}
    return {**options, "part_bytes": PART_BYTES, **patience}


def without_metadata(path: Any) -> Store:
    """Open a folder whose `.metadata` cannot be written; module-level, and so picklable."""
    error = StorageError("the storage is away")
    return FaultInjectingStore(
        PosixStore(path), Fault("publish", name=METADATA_NAME, onwards=True, error=error)
    )
