"""One rank's share of a save as data files: which rows go into which, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp.storage.engine.memory import gather_small
from dcp.storage.engine.write import JOINED_BYTES, DataFile, WriteOutcome
from dcp.storage.formats.index import Int64, starts
from dcp.storage.geometry.ragged import expand_ranges
from dcp.storage.tensors import byte_pieces, narrow, whole_memories

__all__ = ["FilePartition", "WriteRequest", "Written", "collect", "write_partition"]

_ALIKE_FROM = 8
"""Tensors of one dtype and shape, one after the other, from which on they are written together."""

_ALIKE_BYTES = 256 << 10


@dataclass(frozen=True)
class WriteRequest:
    """What a rank has to write, row by row in file order.

    Row i is a box of ``sources[i]`` (a local tensor on any device), of ``payload_bytes[i]``: where it begins
    and its extent are the values of ``local_offsets`` and ``sizes`` from ``box_start[i]`` on. Its bytes are
    those of row ``shares[i]`` if that is not -1. ``blobs`` are the objects' torch.save bytes and ``values``
    their plain msgpack encodings or None; equal blobs are stored once.
    """

    sources: Sequence[torch.Tensor]
    dtype_codes: npt.NDArray[np.uint8]
    box_start: Int64
    sizes: Int64
    local_offsets: Int64
    payload_bytes: Int64
    shares: Int64
    blobs: Sequence[bytes] = ()
    values: Sequence[bytes | None] = ()

    @cached_property
    def own_rows(self) -> Int64:
        """The rows that are written."""
        return np.flatnonzero(self.shares < 0)

    @cached_property
    def distinct_blobs(self) -> list[bytes]:
        """``blobs``, each once."""
        return list(dict.fromkeys(self.blobs))

    def of_row(self, values: Int64, row: int) -> tuple[int, ...]:
        """A row's part of ``sizes`` or ``local_offsets``."""
        return tuple(values[self.box_start[row] : self.box_start[row + 1]].tolist())

    def alike(self, rows: Int64) -> Iterator[Int64]:
        """``rows``, cut wherever the dtype or the extent of the box changes."""
        ndims, codes = np.diff(self.box_start)[rows], self.dtype_codes[rows]
        differs = (codes[1:] != codes[:-1]) | (ndims[1:] != ndims[:-1])
        compared = np.flatnonzero(~differs & (ndims[1:] > 0))
        if len(compared):
            counts = ndims[compared]
            before, after = (
                self.sizes[expand_ranges(self.box_start[rows[compared + step]], counts)] for step in (0, 1)
            )
            differs[compared] = np.logical_or.reduceat(before != after, starts(counts)[:-1])
        edges = [0, *(np.flatnonzero(differs) + 1).tolist(), len(rows)]
        return (rows[begin:end] for begin, end in pairwise(edges) if begin < end)


@dataclass
class FilePartition:
    """One data file with the rows that go into it."""

    rows: Int64
    with_objects: bool = False


class Written(NamedTuple):
    """A partition's complete file, and where the objects are in it."""

    file: DataFile
    objects: list[tuple[int, int, int]]


def write_partition(
    request: WriteRequest, on_bytes: Callable[[int], None] | None, file: DataFile, partition: FilePartition
) -> list[tuple[int, int, int]]:
    """Write the rows and objects of ``partition``; returns (offset, length, CRC-32) by object."""
    objects: list[tuple[int, int, int]] = []
    if partition.with_objects:
        distinct = request.distinct_blobs
        stored = dict(zip(distinct, file.blobs(distinct), strict=True))
        objects = [stored[blob] for blob in request.blobs]
    for alike in request.alike(partition.rows):
        first, rows = int(alike[0]), alike.tolist()
        code, sizes = int(request.dtype_codes[first]), request.of_row(request.sizes, first)
        if len(rows) >= _ALIKE_FROM and request.payload_bytes[first] <= JOINED_BYTES:
            rows = _write_alike(request, on_bytes, file, rows)
        for row in rows:
            source = request.sources[row]
            if source.shape != sizes:
                source = narrow(source, request.of_row(request.local_offsets, row), sizes)
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
    code, sizes = int(request.dtype_codes[rows[0]]), request.of_row(request.sizes, rows[0])
    size = int(request.payload_bytes[rows[0]])
    step = max(1, _ALIKE_BYTES // max(size, 256))
    for begin in range(0, len(rows), step):
        sources = [request.sources[row] for row in rows[begin : begin + step]]
        addresses = whole_memories(sources, math.prod(sizes))
        if addresses is None:
            return rows[begin:]
        payloads = gather_small(addresses, size)
        file.alike(code, sizes, payloads)
        if on_bytes is not None:
            on_bytes(payloads.nbytes)
    return []


def collect(
    request: WriteRequest,
    written: Sequence[Written],
    partitions: Sequence[FilePartition],
) -> WriteOutcome:
    """One outcome in request order; shared rows get the place of the row that they share."""
    rows = len(request.shares)
    files = [part.file for part in written]
    order = np.concatenate([partition.rows for partition in partitions])
    target = np.where(request.shares < 0, np.arange(rows, dtype=np.int64), request.shares)
    place = np.full(rows, -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    take = place[target]

    def column(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        parts = [np.array(getattr(file.rows, name), dtype=np.int64) for file in files]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    counts = column("crc_counts")
    crc_rows = expand_ranges(starts(counts)[:-1][take], counts[take])
    number_with_objects = next(
        (number for number, partition in enumerate(partitions) if partition.with_objects), 0
    )
    objects = written[number_with_objects].objects
    offsets, lengths, crcs = np.array(objects, dtype=np.int64).reshape(-1, 3).T.copy()
    return WriteOutcome(
        files=[file.name for file in files],
        file_sizes=[file.size_bytes for file in files],
        chunk_files=np.repeat(np.arange(len(files)), [len(file.rows.record_offsets) for file in files])[take],
        record_offsets=column("record_offsets")[take],
        record_lengths=column("record_lengths")[take],
        payload_offsets=column("payload_offsets")[take],
        payload_lengths=column("payload_lengths")[take],
        crc_counts=counts[take],
        crcs=column("crcs").astype(np.uint32)[crc_rows],
        object_files=np.full(len(objects), number_with_objects, dtype=np.int64),
        object_offsets=offsets,
        object_lengths=lengths,
        object_crcs=crcs,
        object_values=list(request.values),
    )
