"""One rank's share of a save as data files: rows by file, and the places of what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dcp.storage.engine.memory import gather_small
from dcp.storage.engine.observers import Observer, see_all, see_many_in_all
from dcp.storage.engine.write import JOINED_BYTES, DataFile
from dcp.storage.engine.write_tables import CHUNK_COLUMNS, OBJECT_COLUMNS, WriteColumns, WriteOutcome
from dcp.storage.formats.index import Int64, starts
from dcp.storage.geometry.ragged import expand_ranges
from dcp.storage.tensors import LocalMemory, byte_pieces, narrow

__all__ = ["EncodedObjects", "FilePartition", "PartitionWriter"]

_ALIKE_FROM = 8
"""Tensors of one dtype and shape, one after the other, from which on they are written together."""

_ALIKE_BYTES = 256 << 10


class EncodedObjects(NamedTuple):
    """Values as they are stored: torch.save bytes, and plain msgpack bytes or None. Equal blobs are stored
    once."""

    blobs: Sequence[bytes]
    plain: Sequence[bytes | None]


@dataclass
class FilePartition:
    """The rows that go into one data file."""

    rows: Int64
    with_objects: bool = False

    def split(self, numbers: Int64) -> list[FilePartition]:
        """Return those of its rows that have one of ``numbers`` in a file of their own; objects go with
        number 0."""
        own = numbers[self.rows]
        found = [number for number in np.unique(own).tolist() if number]
        first = FilePartition(self.rows[own == 0], self.with_objects)
        others = [FilePartition(self.rows[own == number]) for number in found]
        return [first, *others] if len(first.rows) or self.with_objects else others


class PartitionWriter:
    """Writes what ``columns`` say of the tensors in ``memory``, and ``objects``, one for each of their rows.

    ``on_bytes`` is called with the payload bytes of what was written, from the writing threads.
    """

    def __init__(
        self,
        columns: WriteColumns,
        memory: LocalMemory,
        objects: EncodedObjects,
        on_bytes: Callable[[int], None] | None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._columns = columns
        self._memory = memory
        self._objects = objects
        self._blobs = list(dict.fromkeys(objects.blobs))
        self._observers = observers
        self._on_bytes = on_bytes if on_bytes is not None else _ignore
        self._dtype_codes = memory.dtype_codes[columns.sources]
        self.payload_bytes = columns.payload_bytes(memory.dtype_codes)

    def sizes(self, partition: FilePartition) -> tuple[int, int, int]:
        """Bytes of payloads, their number, and bytes of objects."""
        objects = sum(map(len, self._blobs)) if partition.with_objects else 0
        return int(self.payload_bytes[partition.rows].sum()), len(partition.rows), objects

    def write(self, file: DataFile, partition: FilePartition) -> Int64:
        """Write the rows and objects of a partition, and finish its file; returns `OBJECT_COLUMNS` of each
        object."""
        objects = np.zeros((0, OBJECT_COLUMNS), np.int64)
        if partition.with_objects:
            stored = dict(zip(self._blobs, file.blobs(self._blobs), strict=True))
            objects = np.array([stored[blob] for blob in self._objects.blobs], np.int64)
        for rows in self._alike(partition.rows):
            if len(rows) >= _ALIKE_FROM and self.payload_bytes[rows[0]] <= JOINED_BYTES:
                self._write_alike(file, rows)
            else:
                self._write_each(file, rows)
        file.finish()
        return objects.reshape(-1, OBJECT_COLUMNS)

    def _alike(self, rows: Int64) -> Iterator[Int64]:
        """``rows``, cut wherever the dtype or the extent of the box changes."""
        start, sizes = self._columns.box_start, self._columns.sizes
        ndims, codes = np.diff(start)[rows], self._dtype_codes[rows]
        differs = (codes[1:] != codes[:-1]) | (ndims[1:] != ndims[:-1])
        compared = np.flatnonzero(~differs & (ndims[1:] > 0))
        if len(compared):
            counts = ndims[compared]
            before, after = (sizes[expand_ranges(start[rows[compared + step]], counts)] for step in (0, 1))
            differs[compared] = np.logical_or.reduceat(before != after, starts(counts)[:-1])
        edges = [0, *(np.flatnonzero(differs) + 1).tolist(), len(rows)]
        for begin, end in pairwise(edges):
            if begin < end:
                yield rows[begin:end]

    def _write_each(self, file: DataFile, rows: Int64) -> None:
        """Write tensors of one dtype and shape one by one."""
        columns, tensors = self._columns, self._memory.tensors
        code, sizes = int(self._dtype_codes[rows[0]]), columns.of_row(columns.sizes, int(rows[0]))
        for row, number in zip(rows.tolist(), columns.sources[rows].tolist(), strict=True):
            source = tensors[number]
            if source.shape != sizes:
                source = narrow(source, columns.of_row(columns.local_offsets, row), sizes)
            see = partial(see_all, self._observers, row) if self._observers else None
            file.tensor(code, sizes, source.nbytes, byte_pieces(source), self._on_bytes, see)

    def _write_alike(self, file: DataFile, rows: Int64) -> None:
        """Write small tensors of one dtype and shape, many at a time where each is all of its memory."""
        columns, memory = self._columns, self._memory
        code, sizes = int(self._dtype_codes[rows[0]]), columns.of_row(columns.sizes, int(rows[0]))
        size, sources = int(self.payload_bytes[rows[0]]), columns.sources[rows]
        is_whole = memory.is_plain[sources] & (memory.volumes[sources] == np.prod(sizes, dtype=np.int64))
        step = max(1, _ALIKE_BYTES // max(size, 256))
        for begin in range(0, len(rows), step):
            if not is_whole[begin : begin + step].all():
                self._write_each(file, rows[begin : begin + step])
                continue
            payloads = gather_small(memory.pointers[sources[begin : begin + step]], size)
            see_many_in_all(self._observers, rows[begin : begin + step], payloads)
            file.alike(code, sizes, payloads)
            self._on_bytes(payloads.nbytes)

    def outcome(
        self,
        files: Sequence[DataFile],
        partitions: Sequence[FilePartition],
        objects: Sequence[Int64],
    ) -> WriteOutcome:
        """The places of all rows, in their order; shared rows get the place of the row they share.

        ``objects`` are what `write` returned of each partition.
        """
        shares = self._columns.shares
        take = np.empty(len(shares), np.int64)  # by row its place among all that was written
        take[np.concatenate([partition.rows for partition in partitions])] = np.arange(
            sum(len(partition.rows) for partition in partitions)
        )
        sharing = np.flatnonzero(shares >= 0)
        take[sharing] = take[shares[sharing]]
        tables, crcs = [], []
        for file in files:
            tables.append(file.rows.table())
            crcs.append(np.array(file.rows.crcs, np.uint32))
        chunks = np.concatenate(tables)
        counts = chunks[:, CHUNK_COLUMNS - 1]
        crc_rows = expand_ranges(starts(counts)[:-1][take], counts[take])
        numbers = np.repeat(np.arange(len(files)), list(map(len, tables)))
        return WriteOutcome(
            files=[file.name for file in files],
            file_sizes=[file.size_bytes for file in files],
            chunks=np.column_stack([numbers, chunks])[take],
            crcs=np.concatenate(crcs)[crc_rows],
            objects=np.concatenate(
                [np.insert(places, 0, number, axis=1) for number, places in enumerate(objects)]
            ),
            object_values=list(self._objects.plain),
        )


def _ignore(size_bytes: int) -> None:
    """The progress of a save that nobody watches."""
