"""Columns of a manifest that only indexes of torch.save files have: strides of payloads, checksums of
records.

No manifest on disk has them: `dcp.save` writes payloads in C order with checksums of blocks. Ranks that load
one torch.save file together get its index as a manifest. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import CheckpointIndex, Int64, starts
from dcp.storage.formats.native.column_codec import Budget, ColumnEncoder, check_counts, decode_column

__all__ = ["decode_strided", "encode_strided"]


def encode_strided(index: CheckpointIndex, encoder: ColumnEncoder) -> dict[str, Any]:
    """Entries for the section of the chunks; none where the index has nothing of the kind."""
    found: dict[str, Any] = {}
    if index.payload_strides:
        rows = sorted(index.payload_strides)
        strides = [stride for row in rows for stride in index.payload_strides[row]]
        found["strided_rows"] = encoder.column(np.array(rows, dtype=np.int64))
        found["strides"] = encoder.column(np.array(strides, dtype=np.int64))
    if index.record_crcs:
        found["record_crc_rows"] = encoder.column(np.array(list(index.record_crcs), dtype=np.int64))
        found["record_crcs"] = encoder.column(np.array(list(index.record_crcs.values()), dtype=np.int64))
    return found


def decode_strided(
    chunks: Mapping[str, Any], box_ndims: Int64, budget: Budget
) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """(strides, checksums of records) by chunk; `CheckpointIndex.check` has the last word on their values."""
    strides: dict[int, tuple[int, ...]] = {}
    if "strided_rows" in chunks:
        rows = _rows(chunks, "strided_rows", len(box_ndims), budget)
        values = decode_column(chunks.get("strides"), budget).tolist()
        check_counts(box_ndims[rows], len(values), "strides")
        bounds = pairwise(starts(box_ndims[rows]).tolist())
        for row, (begin, end) in zip(rows.tolist(), bounds, strict=True):
            strides[row] = tuple(values[begin:end])
    crcs: dict[int, int] = {}
    if "record_crc_rows" in chunks:
        rows = _rows(chunks, "record_crc_rows", len(box_ndims), budget)
        values = decode_column(chunks.get("record_crcs"), budget).tolist()
        if len(values) != len(rows):
            raise CheckpointFormatError("the manifest has not as many checksums of records as rows for them")
        crcs = dict(zip(rows.tolist(), values, strict=True))
    return strides, crcs


def _rows(chunks: Mapping[str, Any], name: str, count: int, budget: Budget) -> Int64:
    rows = decode_column(chunks[name], budget)
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= count or len(np.unique(rows)) != len(rows)):
        raise CheckpointFormatError(f"{name} of the manifest are not rows of chunks, each once")
    return rows
