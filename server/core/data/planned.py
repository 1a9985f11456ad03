"""Bodies generated from tensors during reading: converted files, and slices.

Import this module late: its imports slow down the start of the service.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Final

import numpy as np

from dcp.conversion.layout import SourceColumns, TargetLayout, copy_sources
from dcp.conversion.running import SourceChecks, TaskReader, make_tasks
from dcp.inspection.values.elements import Array
from dcp.inspection.values.tensor_reading import Slices, TensorReader
from dcp.server.core.data.responses import Body, empty_part, part_bytes_of
from dcp.storage.engine.read import ReadEngine
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.geometry.boxes import range_boxes
from dcp.storage.stores.base import Store

_TURNED_PART_BYTES: Final = 16 << 20
"""Part size if payloads are stored in another order than sent."""

_ARRAY_PART_BYTES: Final = 8 << 20

_LITERAL_BYTES: Final = 150  # memory of the objects around the bytes
_HOLE_BYTES: Final = 150


_WINDOW_COPIES: Final = 2_048
"""Maximum tensors in memory: small tensors need more memory for objects than for bytes."""

_dense: Final = threading.Semaphore(1)
"""Held while reading a window of many tensors, which occupies the interpreter."""


class PlannedBody(Body):
    """The single file of a conversion layout, generated during reading. Supports several concurrent readers.

    ``engine`` belongs to the source and is needed for construction only. Raises errors of the storage and of
    opened records.
    """

    def __init__(self, engine: ReadEngine, layout: TargetLayout) -> None:
        (self.size_bytes,) = layout.file_sizes
        self._store = engine.store
        self._index = engine.index
        sources = copy_sources(engine, layout.copies)
        (self._task,) = make_tasks(self._index, layout, self._index.dtype_codes, sources, by_file=True)
        in_order = _is_sequential(sources)
        self._can_seek = in_order and not layout.holes
        self._window_bytes = part_bytes_of(self._store) if in_order else _TURNED_PART_BYTES

    @property
    def held_bytes(self) -> int:
        """The approximate memory of the body, without the index."""
        task = self._task
        columns = (*vars(task.copies).values(), *vars(task.copies.sources).values())
        held = sum(column.nbytes for column in columns if isinstance(column, np.ndarray))
        held += sum(len(data) for _, data in task.literals) + _LITERAL_BYTES * len(task.literals)
        return held + _HOLE_BYTES * len(task.holes)

    def parts(self, begin: int, end: int) -> Generator[memoryview]:
        """Read the parts. Source checksums are compared per complete block; partially read blocks are
        completed before the last part."""
        with ExitStack() as stack:
            engine = stack.enter_context(ReadEngine(self._store, self._index, verify="blocks"))
            first = begin if self._can_seek else 0
            copies = self._task.copies
            bounds = copies.sources.start[[*copies.rows_between(first, end)]]
            chunks = np.unique(copies.sources.chunks[slice(*bounds)])
            engine.resolve(chunks)
            reader = stack.enter_context(
                TaskReader(self._store, replace(self._task, begin=first, end=end), verify=True)
            )
            checks = SourceChecks(engine)
            while reader.position < end:
                at = reader.position
                # a checksum that the source lacks is computed from all earlier bytes
                stop = min(at + self._window_bytes, end if at >= begin else begin)
                limit = copies.end_of(at, _WINDOW_COPIES)
                is_dense = limit is not None and at < limit < stop
                window = empty_part((limit if limit is not None and is_dense else stop) - at)
                with _dense if is_dense else nullcontext():
                    reader.fill(window)
                    checks.add(reader.take_sources())
                if reader.position == end:
                    if first == 0 and end == self.size_bytes:
                        checks.finish(chunks.tolist())
                    else:
                        checks.finish_begun()
                if at >= begin:
                    step = part_bytes_of(self._store)
                    yield from (window[low : low + step] for low in range(0, len(window), step))


def _is_sequential(sources: SourceColumns) -> bool:
    """Return True if the rows of each copy are consecutive in the stored payloads, so ranges stay few."""
    counts = np.diff(sources.axis_start)
    wide = sources.axes[:, 0] > 1
    rows = np.repeat(np.arange(len(counts)), counts)[wide]
    steps = sources.axes[:, 1][wide]
    return not ((rows[1:] == rows[:-1]) & (steps[1:] > steps[:-1])).any()


class ArrayBody(Body):
    """``head``, then the elements of a slice in C order, converted by ``convert`` to ``itemsize`` bytes."""

    def __init__(
        self,
        store: Store,
        index: CheckpointIndex,
        row: int,
        slices: Slices | None,
        *,
        head: bytes,
        itemsize: int,
        convert: Callable[[Array], Array],
    ) -> None:
        self._store = store
        self._index = index
        self._row = row
        self._slices = slices
        self._head = head
        self._itemsize = itemsize
        self._convert = convert
        with TensorReader(store, index) as reader:
            self.shape = reader.shape_of(row, slices)
        self.size_bytes = len(head) + math.prod(self.shape) * itemsize

    def parts(self, begin: int, end: int) -> Generator[memoryview]:
        """Read the parts. Blocks are read whole and compared."""
        head = memoryview(self._head)[begin:end]
        if head:
            yield head
        begin, end = (max(0, at - len(self._head)) for at in (begin, end))
        if begin >= end:
            return
        size = self._itemsize
        step = max(1, _ARRAY_PART_BYTES // size)
        with TensorReader(self._store, self._index, verify="full", threads=1) as reader:
            for first in range(begin // size, -(-end // size), step):
                last = min(first + step, -(-end // size))
                data = self._read(reader, first, last)
                yield data[max(0, begin - first * size) : end - first * size]

    def _read(self, reader: TensorReader, first: int, last: int) -> memoryview:
        """Read elements ``first`` to ``last`` of the result."""
        arrays = []
        for box in range_boxes(self.shape, first, last):
            array = reader.read(self._row, self._slices, box.slices)
            arrays.append(np.ascontiguousarray(self._convert(array)).reshape(-1).view(np.uint8))
        return (arrays[0] if len(arrays) == 1 else np.concatenate(arrays)).data
