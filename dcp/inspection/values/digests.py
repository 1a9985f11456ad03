"""Digests of a checkpoint's tensors, of whatever format and sharding: those that it tells, or by reading.

What they are is in `docs/reference/format.md`, section 10. Torch-free, in bounded memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.values.tensor_reading import ReportBytes, TensorReader, opened
from dcp.planners.load.selection import Patterns
from dcp.storage.digests import (
    SUM_BYTES,
    BoxDigest,
    OrderedSum,
    blocks_of,
    digest_of_all,
    logical_runs,
    shown_digest,
)
from dcp.storage.formats.index import CheckpointIndex


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """One tensor's; ``is_read``: computed from its bytes now, not taken from the manifest."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    is_read: bool


@dataclass(frozen=True, slots=True)
class CheckpointDigests:
    """Each tensor's, in the checkpoint's order, and one of all of these by their names (``digest``)."""

    url: str
    digest: str
    tensors: tuple[TensorDigest, ...]
    bytes_read: int


@plain_errors
def digests(
    checkpoint_id: str | os.PathLike[str] | TensorReader,
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    recompute: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: ReportBytes | None = None,
) -> CheckpointDigests:
    """Compute the digests of tensors: equal for equal dtype, shape and bytes, however they are sharded and
    stored.

    Those that the manifest has are not computed. Memory is bounded by some 64 MiB.

    Args:
        checkpoint_id: A path or URL: a checkpoint, a torch.save file, a safetensors file, or a Hugging Face
            folder; or a reader of one, which stays open.
        only: Shell globs on names, as for `dcp.load`: what they match, and everything below.
        exclude: The same for what is left out.
        recompute: Read all of them, whatever the manifest says.
        storage_options: Of the file system of a URL, as for `dcp.save`.
        progress: A function that gets the bytes done and those in all.

    Returns:
        Digests by tensor, and of all of them.

    Raises:
        PlanError: Nothing is selected.
        CheckpointNotFoundError: Nothing is committed there.
        CorruptCheckpointError: Bytes are not those that were committed.
        StorageError: The storage cannot be read.
    """
    with opened(checkpoint_id, storage_options) as reader:
        index, rows = reader.index, reader.rows(only, exclude)
        known = {} if recompute else {row: noted for row in rows if (noted := index.digest(row)) is not None}
        read = sums_of(reader, [row for row in rows if row not in known], progress)
        known |= {row: digest_of_sum(index, row, total) for row, total in read.items()}
        tensors = tuple(
            TensorDigest(index.fqns[row], index.dtype(row).name, index.shape(row), known[row], row in read)
            for row in rows
        )
        of_all = digest_of_all((tensor.fqn, tensor.digest) for tensor in tensors)
        return CheckpointDigests(reader.name, of_all, tensors, reader.bytes_read)


def sums_of(
    reader: TensorReader, rows: Sequence[int], progress: ReportBytes | None = None
) -> dict[int, bytes]:
    """Return by row the sum behind a tensor's digest, as a manifest has it; all the tensors are read, in
    bounded memory."""
    sums = {row: bytes(SUM_BYTES) for row in rows}
    for row, tiles in reader.tiles_of(rows, progress):
        found, shape = OrderedSum(), reader.index.shape(row)
        for tile in tiles:
            runs = logical_runs(shape, tile.offsets, tile.array.shape, tile.array.itemsize)
            box = BoxDigest(runs)
            box.update(np.ascontiguousarray(tile.array).reshape(-1).view(np.uint8).data)
            found.add(box.value(), blocks_of(runs.last_end))
        sums[row] = found.upto(blocks_of(reader.tensor_bytes(row))).to_bytes(SUM_BYTES, "big")
    return sums


def digest_of_sum(index: CheckpointIndex, row: int, total: bytes) -> str:
    """Return a tensor's digest as it is shown."""
    return shown_digest(total, index.dtype(row).name, index.shape(row))
