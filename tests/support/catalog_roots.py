"""Roots with checkpoints of all kinds, and a scanner over them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest

OLD_SECONDS = 1_700_000_000.0
"""A modification time of files that no process writes any more."""


def age(path: Path, seconds: float = OLD_SECONDS) -> None:
    """Set the modification time of a file, or of all files below a folder."""
    for each in (path, *path.rglob("*")) if path.is_dir() else (path,):
        os.utime(each, (seconds, seconds))


@cache
def index_of(tensors: int = 3) -> CheckpointIndex:
    """Build an index of tensors of 4 x 8 bfloat16 in one file."""
    shape = np.tile(np.array([4, 8], dtype=np.int64), tensors)
    places = np.arange(tensors, dtype=np.int64) * 64
    lengths = np.full(tensors, 64, dtype=np.int64)
    return CheckpointIndex(
        format="dcp",
        fqns=[f"layers.{number}.weight" for number in range(tensors)],
        dtype_codes=np.full(tensors, 4, dtype=np.uint8),
        shape_start=2 * np.arange(tensors + 1),
        shape_values=shape,
        requires_grad=np.zeros(tensors, dtype=np.uint8),
        chunk_start=np.arange(tensors + 1, dtype=np.int64),
        chunk_offsets=np.zeros(2 * tensors, dtype=np.int64),
        chunk_sizes=shape,
        chunk_files=np.zeros(tensors, dtype=np.int64),
        record_offsets=places,
        record_lengths=lengths,
        payload_offsets=places,
        payload_lengths=lengths,
        crc_start=np.zeros(tensors + 1, dtype=np.int64),
        files=["__0_0.0000abcd.distcp"],
        file_sizes=np.array([64 * tensors], dtype=np.int64),
    )


def write_manifest(
    folder: Path,
    *,
    save_id: str = "0000abcd",
    tensors: int = 3,
    user: Mapping[str, Any] | None = None,
    seconds: float | None = OLD_SECONDS,
    provenance: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write the manifest of a committed checkpoint with old timestamps; the catalog reads only the manifest.

    ``user`` holds the user's notes; other ``changes`` replace fields of the index.
    """
    provenance = {"save_id": save_id, "time": OLD_SECONDS, "world_size": 2, **(provenance or {})}
    index = replace(index_of(tensors), provenance=provenance, user=dict(user or {}), **changes)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MANIFEST_NAME
    path.write_bytes(encode_manifest(index))
    if seconds is not None:
        age(path, seconds)
    return path
