"""Digests of a checkpoint's tensors, of whatever format and sharding: those that it tells, or by reading.

What they are is in `docs/format.md`, section 10. Torch-free, in bounded memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.findings import Finding, ReportBytes
from dcp.inspection.values.tensor_reading import TensorReader, open_tensors
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

__all__ = [
    "CheckedDigests",
    "CheckpointDigests",
    "TensorDigest",
    "check_digests",
    "digests",
    "digests_of",
    "sums_of",
]


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
    checkpoint_id: str | os.PathLike[str],
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
            folder.
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
    with open_tensors(checkpoint_id, storage_options=storage_options, verify="full") as reader:
        return digests_of(reader, only=only, exclude=exclude, recompute=recompute, progress=progress)


def digests_of(
    reader: TensorReader,
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    recompute: bool = False,
    progress: ReportBytes | None = None,
) -> CheckpointDigests:
    """`digests` of an open checkpoint."""
    index, rows = reader.index, reader.rows(only, exclude)
    known = {} if recompute else {row: noted for row in rows if (noted := index.digest(row)) is not None}
    read = dict(_read(reader, [row for row in rows if row not in known], progress))
    tensors = tuple(
        TensorDigest(
            index.fqns[row], index.dtype(row).name, index.shape(row), known.get(row) or read[row], row in read
        )
        for row in rows
    )
    of_all = digest_of_all((tensor.fqn, tensor.digest) for tensor in tensors)
    return CheckpointDigests(reader.name, of_all, tensors, reader.bytes_read)


class CheckedDigests(NamedTuple):
    """Findings about digests, and the digest of all tensors; None where not all were looked at."""

    findings: list[Finding]
    digest: str | None


def check_digests(
    reader: TensorReader,
    sums: Mapping[int, bytes],
    other: CheckpointDigests | None = None,
    *,
    is_all: bool = False,
) -> CheckedDigests:
    """Find the tensors of ``reader`` that are not what its manifest's digests say, and those that are not
    the ones of ``other``. Of those that ``sums`` lack the ones with a digest in the manifest are read, and
    all where there is an ``other`` or ``is_all``."""
    index = reader.index
    noted = {row: digest for row in range(index.tensor_count) if (digest := index.digest(row)) is not None}
    rows = [*noted] if other is None and not is_all else [*range(index.tensor_count)]
    own = {row: _shown(index, row, sums[row]) for row in rows if row in sums}
    own |= _read(reader, [row for row in rows if row not in sums], None)
    found = [
        _differs_from_manifest(reader, row, own[row], digest)
        for row, digest in noted.items()
        if own[row] != digest
    ]
    if other is not None:
        found += _compared(reader, own, other)
    named = ((index.fqns[row], digest) for row, digest in own.items())
    return CheckedDigests(found, digest_of_all(named) if len(own) == index.tensor_count else None)


def _differs_from_manifest(reader: TensorReader, row: int, own: str, noted: str) -> Finding:
    fqn = reader.index.fqns[row]
    message = f"{fqn!r} has the digest {own}, and the manifest says {noted}, which comparisons go by"
    return Finding("digest", message, fqn=fqn)


def _compared(reader: TensorReader, own: Mapping[int, str], other: CheckpointDigests) -> list[Finding]:
    index, theirs = reader.index, {tensor.fqn: tensor for tensor in other.tensors}
    found = []
    for row, digest in own.items():
        fqn, same = index.fqns[row], theirs.pop(index.fqns[row], None)
        if same is None:
            found.append(Finding("digest", f"{fqn!r} is not in {other.url}", fqn=fqn))
        elif same.digest != digest:
            here = _facts(index.dtype(row).name, index.shape(row), digest)
            there = _facts(same.dtype, same.shape, same.digest)
            message = f"{fqn!r} is another one in {other.url}: {here} here, there {there}"
            found.append(Finding("digest", message, fqn=fqn))
    return found + [Finding("digest", f"{fqn!r} is only in {other.url}", fqn=fqn) for fqn in theirs]


def _facts(dtype: str, shape: Sequence[int], digest: str) -> str:
    return f"{dtype} {'x'.join(map(str, shape)) or 'scalar'} {digest}"


def _read(
    reader: TensorReader, rows: Sequence[int], progress: ReportBytes | None
) -> Iterator[tuple[int, str]]:
    """Return the digests of ``rows``, in bounded memory."""
    sums = sums_of(reader, rows, progress)
    return ((row, _shown(reader.index, row, total)) for row, total in sums.items())


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


def _shown(index: CheckpointIndex, row: int, total: bytes) -> str:
    return shown_digest(total, index.dtype(row).name, index.shape(row))
