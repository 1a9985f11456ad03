"""The coordinator's last step before the commit: planned index + where every rank put its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dcp.storage.engine.write_tables import WriteColumns, WriteOutcome
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex, Int64, starts
from dcp.storage.geometry.ragged import expand_ranges, row_products

__all__ = ["assemble_index"]


def assemble_index(
    planned: CheckpointIndex, writes: Sequence[WriteColumns], outcomes: Sequence[WriteOutcome]
) -> CheckpointIndex:
    """``planned`` with its file, record, payload and CRC columns filled in, from what each rank had to write
    and what it wrote.

    Raises PlanError if any chunk or object of the plan has no place.
    """
    file_base = np.cumsum([0, *(len(outcome.files) for outcome in outcomes)])
    rows = _concatenate([columns.chunks for columns in writes])
    total = planned.chunk_count
    chunk_files = _scatter(
        planned.chunk_count, rows, [o.chunk_files + file_base[r] for r, o in enumerate(outcomes)]
    )
    if (chunk_files < 0).any():
        missing = int(np.flatnonzero(chunk_files < 0)[0])
        fqn = planned.fqns[int(planned.chunk_tensors[missing])]
        raise PlanError(f"no rank wrote chunk {planned.box(missing)} of {fqn!r}", fqn=fqn)
    crc_start, crcs = _crcs(planned.chunk_count, rows, outcomes)
    object_rows = _concatenate([columns.object_rows for columns in writes])
    count = len(planned.objects)
    object_files = _scatter(
        count, object_rows, [o.object_files + file_base[r] for r, o in enumerate(outcomes)]
    )
    if (object_files < 0).any():
        fqn = planned.objects.fqns[int(np.flatnonzero(object_files < 0)[0])]
        raise PlanError(f"no rank wrote object {fqn!r}", fqn=fqn)
    plain, values = _plain_values(count, object_rows, outcomes)
    digests = _digests(planned, rows, outcomes)
    return dataclasses.replace(
        planned,
        record_offsets=_scatter(total, rows, [outcome.record_offsets for outcome in outcomes]),
        record_lengths=_scatter(total, rows, [outcome.record_lengths for outcome in outcomes]),
        payload_offsets=_scatter(total, rows, [outcome.payload_offsets for outcome in outcomes]),
        payload_lengths=_scatter(total, rows, [outcome.payload_lengths for outcome in outcomes]),
        chunk_files=chunk_files,
        crc_start=crc_start,
        crcs=crcs,
        digests=digests,
        files=[name for outcome in outcomes for name in outcome.files],
        file_sizes=np.array([size for outcome in outcomes for size in outcome.file_sizes], dtype=np.int64),
        objects=dataclasses.replace(
            planned.objects,
            files=object_files,
            offsets=_scatter(count, object_rows, [o.object_offsets for o in outcomes]),
            lengths=_scatter(count, object_rows, [o.object_lengths for o in outcomes]),
            crcs=_scatter(count, object_rows, [o.object_crcs for o in outcomes]),
            plain=plain,
            values=values,
        ),
    )


def _concatenate(parts: Sequence[npt.NDArray[np.int64]]) -> Int64:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _scatter(count: int, rows: Int64, parts: Sequence[npt.NDArray[np.int64]]) -> Int64:
    column = np.full(count, -1, dtype=np.int64)
    column[rows] = _concatenate(parts)
    return column


def _crcs(count: int, rows: Int64, outcomes: Sequence[WriteOutcome]) -> tuple[Int64, npt.NDArray[np.uint32]]:
    counts = np.zeros(count, dtype=np.int64)
    written = _concatenate([outcome.crc_counts for outcome in outcomes])
    counts[rows] = written
    crc_start = starts(counts)
    crcs = np.zeros(int(crc_start[-1]), dtype=np.uint32)
    flat = np.concatenate([np.zeros(0, np.uint32), *(outcome.crcs for outcome in outcomes)])
    crcs[expand_ranges(crc_start[:-1][rows], written)] = flat
    return crc_start, crcs


def _digests(planned: CheckpointIndex, rows: Int64, outcomes: Sequence[WriteOutcome]) -> list[bytes]:
    """The sums of the tensors whose chunks are all of them, where each says what it adds."""
    has = np.concatenate([np.zeros(0, np.uint8), *(outcome.has_digests for outcome in outcomes)])
    if len(has) != len(rows) or not len(has):
        return []
    known, added = np.zeros(planned.chunk_count, np.bool_), np.zeros((planned.chunk_count, 2), np.uint64)
    known[rows] = has
    added[rows] = np.concatenate([outcome.digests for outcome in outcomes]).reshape(-1, 2)
    volumes = row_products(planned.chunk_sizes, planned.box_start) * known
    starts, filled = planned.chunk_start[:-1], np.diff(planned.chunk_start) > 0
    covered, sums = np.zeros(planned.tensor_count, np.int64), np.zeros((planned.tensor_count, 2), np.uint64)
    covered[filled] = np.add.reduceat(volumes, starts[filled])
    sums[filled] = np.bitwise_xor.reduceat(added, starts[filled], axis=0)
    is_whole = (covered == row_products(planned.shape_values, planned.shape_start)).tolist()
    return [one.tobytes() if whole else b"" for one, whole in zip(sums, is_whole, strict=True)]


def _plain_values(count: int, rows: Int64, outcomes: Sequence[WriteOutcome]) -> tuple[Int64, list[bytes]]:
    plain = np.full(count, -1, dtype=np.int64)
    numbers: dict[bytes, int] = {}
    encoded = [value for outcome in outcomes for value in outcome.object_values]
    for row, value in zip(rows.tolist(), encoded, strict=True):
        if value is not None:
            plain[row] = numbers.setdefault(value, len(numbers))
    return plain, list(numbers)
