"""One rank's share of a save as data files: which rows go into which, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from dcp.storage.engine.memory import copy_small
from dcp.storage.engine.reading.assemble import ragged_positions
from dcp.storage.engine.write import JOINED_BYTES, DataFile, WriteOutcome
from dcp.storage.tensors import byte_pieces, is_whole_memory, narrow

__all__ = ["Lane", "WriteRequest", "Written", "collect", "row_bytes", "write_lane"]

_ALIKE_FROM = 8
"""Tensors of one dtype and shape, one after the other, from which on they are written together."""

_ALIKE_BYTES = 256 << 10


@dataclass(frozen=True)
class WriteRequest:
    """What a rank has to write, row by row in file order.

    Row i is the box at ``local_offsets[i]`` of extent ``sizes[i]`` of ``sources[i]`` (a local tensor on any
    device); its bytes are those of row ``shares[i]`` if that is not -1. ``blobs`` are the objects' torch.save
    bytes and ``values`` their plain msgpack encodings or None; equal blobs are stored once.
    """

    sources: Sequence[torch.Tensor] = ()
    dtype_codes: Sequence[int] = ()
    sizes: Sequence[tuple[int, ...]] = ()
    local_offsets: Sequence[tuple[int, ...]] = ()
    shares: Sequence[int] = ()
    blobs: Sequence[bytes] = ()
    values: Sequence[bytes | None] = ()


@dataclass
class Lane:
    """One data file with the rows that go into it."""

    rows: list[int] = field(default_factory=list)
    with_objects: bool = False


class Written(NamedTuple):
    """A lane's complete file, and where the objects are in it."""

    file: DataFile
    objects: list[tuple[int, int, int]]


def row_bytes(request: WriteRequest, row: int) -> int:
    """Payload bytes of a row."""
    size = request.sources[row].element_size()
    for extent in request.sizes[row]:
        size *= extent
    return size


def write_lane(
    request: WriteRequest, on_bytes: Callable[[int], None] | None, file: DataFile, lane: Lane
) -> list[tuple[int, int, int]]:
    """Write a lane's rows and objects, and finish the file; returns (offset, length, CRC-32) by object."""
    objects: list[tuple[int, int, int]] = []
    if lane.with_objects:
        distinct = list(dict.fromkeys(request.blobs))
        stored = dict(zip(distinct, file.blobs(distinct), strict=True))
        objects = [stored[blob] for blob in request.blobs]
    codes, all_sizes = request.dtype_codes, request.sizes
    alike = groupby(lane.rows, key=lambda row: (codes[row], all_sizes[row]))
    for (code, sizes), group in alike:
        rows = list(group)
        if len(rows) >= _ALIKE_FROM and row_bytes(request, rows[0]) <= JOINED_BYTES:
            rows = _write_alike(request, on_bytes, file, rows)
        for row in rows:
            source = request.sources[row]
            if source.shape != sizes:
                source = narrow(source, request.local_offsets[row], sizes)
            file.tensor(code, sizes, source.nbytes, byte_pieces(source))
            if on_bytes is not None:
                on_bytes(source.nbytes)
    file.finish()
    return objects


def _write_alike(
    request: WriteRequest, on_bytes: Callable[[int], None] | None, file: DataFile, rows: list[int]
) -> list[int]:
    """Write small tensors of one dtype and shape many at a time; returns the rows from where that ends.

    It ends at a tensor that is not all of its row's bytes in its own memory.
    """
    code, sizes, size = request.dtype_codes[rows[0]], request.sizes[rows[0]], row_bytes(request, rows[0])
    step = max(1, _ALIKE_BYTES // max(size, 256))
    for begin in range(0, len(rows), step):
        sources = [request.sources[row] for row in rows[begin : begin + step]]
        if not all(source.shape == sizes and is_whole_memory(source) for source in sources):
            return rows[begin:]
        payloads = np.empty((len(sources), size), np.uint8)
        if size:
            first = payloads.ctypes.data
            for place, source in zip(range(first, first + payloads.nbytes, size), sources, strict=True):
                copy_small(place, source.data_ptr(), size)
        file.alike(code, sizes, payloads)
        if on_bytes is not None:
            on_bytes(payloads.nbytes)
    return []


def collect(
    request: WriteRequest,
    written: Sequence[Written],
    lanes: Sequence[Lane],
) -> WriteOutcome:
    """One outcome in request order from the lanes' files; shared rows get the place of the row they share."""
    rows = len(request.shares)
    files = [lane.file for lane in written]
    outcome = WriteOutcome(files=[file.name for file in files])
    outcome.file_sizes = [file.size_bytes for file in files]
    order = np.array([row for lane in lanes for row in lane.rows], dtype=np.int64)
    target = np.arange(rows, dtype=np.int64)
    shares = np.asarray(request.shares, dtype=np.int64)
    target[shares >= 0] = shares[shares >= 0]
    place = np.full(rows, -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    take = place[target]

    def column(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        parts = [np.array(getattr(file.rows, name), dtype=np.int64) for file in files]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    numbers = np.repeat(np.arange(len(files)), [len(file.rows.record_offsets) for file in files])
    outcome.chunk_files = numbers[take]
    outcome.record_offsets = column("record_offsets")[take]
    outcome.record_lengths = column("record_lengths")[take]
    outcome.payload_offsets = column("payload_offsets")[take]
    outcome.payload_lengths = column("payload_lengths")[take]
    counts = column("crc_counts")
    outcome.crc_counts = counts[take]
    crc_start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=crc_start[1:])
    all_crcs = np.array([crc for file in files for crc in file.rows.crcs], dtype=np.uint32)
    outcome.crcs = all_crcs[ragged_positions(crc_start[:-1][take], outcome.crc_counts)]
    lane_number = next((number for number, lane in enumerate(lanes) if lane.with_objects), 0)
    objects = written[lane_number].objects
    outcome.object_files = np.full(len(objects), lane_number, dtype=np.int64)
    places = np.array(objects, dtype=np.int64).reshape(-1, 3)
    outcome.object_offsets, outcome.object_lengths, outcome.object_crcs = places.T.copy()
    outcome.object_values = list(request.values)
    return outcome
