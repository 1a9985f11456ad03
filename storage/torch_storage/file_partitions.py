"""File partitions of a save: rows of each data file and positions of the written chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter

import numpy as np

from dcp.storage.engine.memory import gather_small, item_view, view
from dcp.storage.engine.write import (
    CHUNK_COLUMNS,
    OBJECT_COLUMNS,
    WHOLE_BYTES,
    DataFile,
    Observer,
    Payload,
    WriteColumns,
    WriteOutcome,
    see_all,
    see_many_in_all,
)
from dcp.storage.formats.index import itemsizes
from dcp.storage.formats.native.record import ALIGNED_PAYLOAD_BYTES
from dcp.storage.geometry.strides import Int64, expand_ranges, starts
from dcp.storage.tensors import LocalMemory, byte_pieces, narrow

_ALIKE_FROM = 8
"""Minimum number of consecutive tensors of equal dtype and shape written together."""

_ALIKE_BYTES = 256 << 10
_MOST_TOGETHER = 256
_TOGETHER_BYTES = (128 << 10, WHOLE_BYTES)
"""Maximum size of temporary copies written together, small enough for the cache."""


class PartitionWriter:
    """Writer of ``columns`` of the tensors in ``memory``, and of objects as ``blobs``, with equal blobs
    stored once.

    ``new_file`` creates a data file by number for some payload bytes and records. ``on_bytes`` receives the
    number of written payload bytes, from the writing threads.
    """

    def __init__(
        self,
        columns: WriteColumns,
        memory: LocalMemory,
        blobs: Sequence[bytes],
        new_file: Callable[[int, int, int], DataFile],
        on_bytes: Callable[[int], None] | None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._columns = columns
        self._memory = memory
        self._blobs = blobs
        self._new_file = new_file
        self._on_bytes = on_bytes
        self._observers = observers
        self._dtype_codes = memory.dtype_codes[columns.sources]
        self.payload_bytes = columns.payload_bytes(memory.dtype_codes)
        tensor_bytes = memory.volumes[columns.sources] * itemsizes(self._dtype_codes)
        self._is_whole = memory.is_plain[columns.sources] & (self.payload_bytes == tensor_bytes)
        self.files: dict[int, DataFile] = {}
        self._places = np.zeros((len(blobs), 1 + OBJECT_COLUMNS), np.int64)

    def write(self, number: int, rows: Int64, with_objects: bool) -> None:
        """Write ``rows``, and optionally the objects, as file ``number``."""
        blobs = list(dict.fromkeys(self._blobs)) if with_objects else []
        size_bytes = int(self.payload_bytes[rows].sum()) + sum(map(len, blobs))
        # Created late, because a file per tensor may exceed the limit of open files.
        file = self.files[number] = self._new_file(number, size_bytes, len(rows))
        if blobs:
            stored = dict(zip(blobs, file.blobs(blobs), strict=True))
            self._places[:, 1:] = list(map(stored.__getitem__, self._blobs))
        for some, are_alike in self._runs(rows) if len(rows) >= _ALIKE_FROM else [(rows, False)]:
            if are_alike:
                self._write_alike(file, some)
            else:
                self._write_each(file, some)
        file.finish()

    def _runs(self, rows: Int64) -> list[tuple[Int64, bool]]:
        """Split ``rows`` into (rows, True) for many small rows of equal dtype and extent, and (rows, False)
        for others.
        """
        start, sizes = self._columns.box_start, self._columns.sizes
        ndims, codes = np.diff(start)[rows], self._dtype_codes[rows]
        differs = (codes[1:] != codes[:-1]) | (ndims[1:] != ndims[:-1])
        compared = np.flatnonzero(~differs & (ndims[1:] > 0))
        if len(compared):
            counts = ndims[compared]
            before, after = (sizes[expand_ranges(start[rows[compared + step]], counts)] for step in (0, 1))
            differs[compared] = np.logical_or.reduceat(before != after, starts(counts)[:-1])
        begins = np.flatnonzero(np.append(True, differs))
        are_alike = np.diff(begins, append=len(rows)) >= _ALIKE_FROM
        are_alike &= self.payload_bytes[rows[begins]] < ALIGNED_PAYLOAD_BYTES
        kept = np.append(True, are_alike[1:] | are_alike[:-1])
        pieces = np.split(rows, begins[kept][1:])
        return list(zip(pieces, are_alike[kept].tolist(), strict=True))

    def _write_each(self, file: DataFile, rows: Int64) -> None:
        """Write tensors of any kind, small ones together."""
        columns, memory, batch, batch_bytes = self._columns, self._memory, list[Payload](), 0
        starts, sizes, payloads = map(item_view, (columns.box_start, columns.sizes, self.payload_bytes))
        sources, codes, whole = map(item_view, (columns.sources, self._dtype_codes, self._is_whole))
        pointers = item_view(memory.pointers)
        for row in rows.tolist():
            box, source, size_bytes = slice(starts[row], starts[row + 1]), sources[row], payloads[row]
            shape = tuple(sizes[box])
            if whole[row]:
                pieces: Iterable[bytes | memoryview] = (view(pointers[source], size_bytes),)
            else:
                tensor = memory.tensors[source]
                if tensor.shape != shape:
                    tensor = narrow(tensor, tuple(columns.local_offsets[box].tolist()), shape)
                pieces = byte_pieces(tensor)
            small = pieces if isinstance(pieces, tuple) and size_bytes <= WHOLE_BYTES else None
            if small is not None:
                batch.append((row, codes[row], shape, small[0]))
                batch_bytes += size_bytes
                if batch_bytes < _TOGETHER_BYTES[whole[row]] and len(batch) < _MOST_TOGETHER:
                    continue
            self._write_whole(file, batch, batch_bytes)
            batch, batch_bytes = [], 0
            if small is None:
                see = partial(see_all, self._observers, row) if self._observers else None
                file.tensor(codes[row], shape, size_bytes, pieces, self._on_bytes, see)
        self._write_whole(file, batch, batch_bytes)

    def _write_whole(self, file: DataFile, batch: Sequence[Payload], size_bytes: int) -> None:
        if batch:
            file.whole(batch, partial(see_all, self._observers) if self._observers else None)
            if self._on_bytes is not None:
                self._on_bytes(size_bytes)

    def _write_alike(self, file: DataFile, rows: Int64) -> None:
        """Write many small tensors of equal dtype and shape at a time if each is plain memory."""
        columns, memory, first = self._columns, self._memory, int(rows[0])
        shape = tuple(columns.sizes[columns.box_start[first] : columns.box_start[first + 1]].tolist())
        size = int(self.payload_bytes[first])
        step = max(1, _ALIKE_BYTES // max(size, 256))
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            if not self._is_whole[some].all():
                self._write_each(file, some)
                continue
            payloads = gather_small(memory.pointers[columns.sources[some]], size)
            if size:
                see_many_in_all(self._observers, some, payloads)
            file.alike(int(self._dtype_codes[first]), shape, payloads)
            if self._on_bytes is not None:
                self._on_bytes(payloads.nbytes)

    def outcome(self, partitions: Sequence[Int64], plain: Sequence[bytes | None]) -> WriteOutcome:
        """Return the positions of all rows in order; shared rows have the position of the shared row.

        ``partitions`` are the rows of the files; objects are in the first.
        """
        files = [self.files[number] for number in sorted(self.files)]
        tables = [np.array(file.chunks, np.int64).reshape(-1, CHUNK_COLUMNS) for file in files]
        table = np.concatenate(tables)
        numbers = np.repeat(np.arange(len(files)), list(map(len, tables)))
        shares = self._columns.shares
        take = np.empty(len(shares), np.int64)  # position of each row among all written rows
        take[np.concatenate(partitions)] = np.arange(len(table))
        sharing = np.flatnonzero(shares >= 0)
        take[sharing] = take[shares[sharing]]
        counts = table[:, CHUNK_COLUMNS - 1]
        crcs = np.concatenate([np.array(file.crcs, np.uint32) for file in files])
        return WriteOutcome(
            files=list(map(attrgetter("name"), files)),
            file_sizes=list(map(attrgetter("size_bytes"), files)),
            chunks=np.column_stack([numbers, table])[take],
            crcs=crcs[expand_ranges(starts(counts)[:-1][take], counts[take])],
            objects=self._places,
            object_values=list(plain),
        )
