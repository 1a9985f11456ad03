"""Digests of a checkpoint's tensors in any format and sharding, stored or computed.

`docs/reference/format.md`, section 10, defines digests. Does not import torch; memory is bounded.
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
    """Digest of one tensor; ``is_read``: computed now, not from the manifest."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    is_read: bool


@dataclass(frozen=True, slots=True)
class CheckpointDigests:
    """Digests of all tensors in order, and one ``digest`` of all by name."""

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
    """Return digests of tensors: equal for equal dtype, shape and bytes, in any sharding and format.

    Digests in the manifest are not recomputed. Memory is bounded by about 64 MiB.

    Args:
        checkpoint_id: Path or URL of a checkpoint, torch.save file, safetensors file or Hugging Face folder;
            or an open reader, which stays open.
        only: Names or shell globs, as for `dcp.load`; a name includes everything below.
        exclude: Names or shell globs to leave out.
        recompute: Read all tensors and ignore the manifest's digests.
        storage_options: Options of the URL's file system, as for `dcp.save`.
        progress: Function of (bytes done, total bytes).

    Returns:
        Digests by tensor, and one digest of all.

    Raises:
        PlanError: Nothing is selected.
        CheckpointNotFoundError: No committed checkpoint exists there.
        CorruptCheckpointError: Stored bytes differ from the committed checksums.
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
    """Read tensors in bounded memory and return the sums behind their digests, by row."""
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
    """Format a digest."""
    return shown_digest(total, index.dtype(row).name, index.shape(row))
