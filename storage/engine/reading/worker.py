"""One reading thread: from file ranges into destinations, through scratch memory where they lie apart."""

from __future__ import annotations

import ctypes
import itertools
import math

import numpy as np

from dcp.storage.engine.memory import ScratchBuffers, array_at, item_dtype, view
from dcp.storage.engine.reading.coalescing.clusters import Cluster
from dcp.storage.engine.reading.fragments import within_blocks
from dcp.storage.engine.reading.requests import ReadStats, StridedRegion
from dcp.storage.engine.reading.source import ReadSource
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.geometry.payload_parts import box_parts
from dcp.storage.geometry.strides import extent
from dcp.storage.stores.handles import ReadHandle

__all__ = ["MAX_CLUSTER_BYTES", "SCRATCH", "ReadWorker"]

_STEP_BYTES = 1 << 20
"""Bytes read before they are checksummed, so that the checksum finds them in the cache."""

_SCRATCH_BYTES = 2 * BLOCK_BYTES
MAX_CLUSTER_BYTES = _SCRATCH_BYTES
"""What `ReadWorker.read_cluster` can take."""

_ROW_BYTES = 2 << 20
"""Rows up to this are read through a window; longer ones are split along the next dimension."""

_SPARSE_GAP_BYTES = 512 << 10
"""Between runs farther apart than this, skipping is cheaper than reading on."""


SCRATCH = ScratchBuffers(_SCRATCH_BYTES)
"""Those of all threads of the process that read."""


class ReadWorker:
    """One thread's tools: scratch memory that is reused, and its own figures."""

    def __init__(self, source: ReadSource) -> None:
        self.source = source
        self._use(memoryview(bytearray(1)) if source.joins else SCRATCH.get())
        self.stats = ReadStats()

    def _use(self, scratch: memoryview) -> None:
        self.scratch = scratch
        self.scratch_address = ctypes.addressof(ctypes.c_char.from_buffer(scratch))

    def release(self) -> None:
        """Give the scratch memory back; the worker is of no use any more."""
        SCRATCH.put(self.scratch)

    def room(self, size_bytes: int) -> memoryview:
        """Scratch memory of at least ``size_bytes``; what was in it is gone."""
        if size_bytes > len(self.scratch):
            self._use(SCRATCH.get(size_bytes))
        return self.scratch

    # -- runs ------------------------------------------------------------------------------------------------

    def read_cluster(self, cluster: Cluster) -> None:
        """Small runs by one read."""
        data = self.scratch[: cluster.end - cluster.begin]
        self.source.handle(cluster.file).preadv([data], cluster.begin)
        self.stats.bytes_read += len(data)
        if self.source.verify == "none":
            cluster.copy_out(self.scratch_address)
        else:
            crcs = cluster.copy_out(self.scratch_address, data)
            self.source.check_runs(self.stats, cluster.members.runs, crcs)

    def read_direct(self, chunk: int, position: int, size: int, address: int) -> None:
        """A run straight into its destination, block by block."""
        source = self.source
        handle, origin = source.locate(chunk)
        if source.verify == "none":
            handle.preadv([view(address, size)], origin + position)
            self.stats.bytes_read += size
            return
        payload_bytes = source.payload_lengths[chunk]
        for first, last in within_blocks(size, position):
            begin, end, target = position + first, position + last, address + first
            block = begin // BLOCK_BYTES
            is_whole = last - first == min(BLOCK_BYTES, payload_bytes - block * BLOCK_BYTES)
            if not is_whole and source.verify == "full":
                self._read_block_part(handle, origin, chunk, block, begin, end, target)
            else:
                crc = self.read_steps(handle, origin + begin, view(target, end - begin))
                source.check_part(self.stats, chunk, begin, end - begin, crc)

    def read_steps(self, handle: ReadHandle, offset: int, target: memoryview) -> int:
        """Fill ``target`` from file offset ``offset``; returns its CRC-32."""
        crc = done = 0
        size = len(target)
        while done < size:
            step = target[done : done + _STEP_BYTES]
            handle.preadv([step], offset + done)
            crc = crc32(step, crc)
            done += len(step)
        self.stats.bytes_read += size
        return crc

    def _read_block_part(
        self, handle: ReadHandle, origin: int, chunk: int, block: int, begin: int, end: int, address: int
    ) -> None:
        block_begin = block * BLOCK_BYTES
        block_bytes = min(BLOCK_BYTES, int(self.source.index.payload_lengths[chunk]) - block_begin)
        crc = self.read_steps(handle, origin + block_begin, self.scratch[:block_bytes])
        self.source.check_block(self.stats, chunk, block, crc)
        ctypes.memmove(address, self.scratch_address + begin - block_begin, end - begin)

    # -- regions ---------------------------------------------------------------------------------------------

    def read_region(self, region: StridedRegion) -> None:
        """Elements that lie apart, in the file or in memory."""
        chunk, begin, lengths, strides = region.elements
        if math.prod(lengths) == 0:
            return
        if chunk in self.source.index.payload_strides:
            self._read_parts(region)
            return
        itemsize = self.source.itemsize(chunk)
        split = next((d for d, stride in enumerate(strides) if stride <= _ROW_BYTES), len(strides) - 1)
        if not strides:
            self._read_rows(chunk, begin, 1, itemsize, (), (), region.address, 0, ())
            return
        for outer in itertools.product(*(range(n) for n in lengths[:split])):
            position = begin + sum(i * s for i, s in zip(outer, strides, strict=False))
            address = region.address + sum(i * s for i, s in zip(outer, region.strides, strict=False))
            self._read_rows(
                chunk,
                position,
                lengths[split],
                strides[split],
                lengths[split + 1 :],
                strides[split + 1 :],
                address,
                region.strides[split],
                region.strides[split + 1 :],
            )

    def _read_parts(self, region: StridedRegion) -> None:
        """Of a payload that may have gaps, or elements that stand for several."""
        chunk, begin, lengths, strides = region.elements
        index = self.source.index
        itemsize = self.source.itemsize(chunk)
        dtype = item_dtype(itemsize)
        # Without a checksum to compare there is no use in completing blocks.
        verify = self.source.verify != "none" and index.payload_crc(chunk) is not None
        window = _SlidingWindow(self, chunk, verify=verify)
        for part in box_parts(
            begin, lengths, strides, itemsize, limit_bytes=BLOCK_BYTES, gap_bytes=_SPARSE_GAP_BYTES
        ):
            at = window.load(part.begin, part.end)
            source = np.ndarray(part.lengths, dtype, self.scratch, at, strides)
            address = region.address + sum(o * s for o, s in zip(part.offsets, region.strides, strict=True))
            np.copyto(array_at(address, itemsize, part.lengths, region.strides), source)

    def _read_rows(
        self,
        chunk: int,
        position: int,
        rows: int,
        row_stride: int,
        inner: tuple[int, ...],
        inner_strides: tuple[int, ...],
        address: int,
        dest_row_stride: int,
        dest_strides: tuple[int, ...],
    ) -> None:
        itemsize = self.source.itemsize(chunk)
        row_bytes = extent(inner, inner_strides, itemsize)
        sparse = row_stride - row_bytes > _SPARSE_GAP_BYTES and self.source.verify != "full"
        window = _SlidingWindow(self, chunk, verify=self.source.verify != "none" and not sparse)
        row = 0
        while row < rows:
            first = position + row * row_stride
            count = 1 if sparse else min(rows - row, window.rows_that_fit(first, row_stride, row_bytes))
            at = window.load(first, first + (count - 1) * row_stride + row_bytes)
            shape = (count, *inner)
            source = np.ndarray(shape, item_dtype(itemsize), self.scratch, at, (row_stride, *inner_strides))
            target = array_at(
                address + row * dest_row_stride, itemsize, shape, (dest_row_stride, *dest_strides)
            )
            np.copyto(target, source)
            row += count


class _SlidingWindow:
    """Scratch that slides over a chunk's payload in whole blocks, so that each block is read and checked
    once."""

    def __init__(self, worker: ReadWorker, chunk: int, *, verify: bool) -> None:
        self._worker = worker
        self._chunk = chunk
        self._verify = verify
        self._handle, self._origin = worker.source.locate(chunk)
        self._payload_bytes = int(worker.source.index.payload_lengths[chunk])
        self._begin = self._end = 0

    def rows_that_fit(self, first: int, row_stride: int, extent: int) -> int:
        """How many rows from payload position ``first`` on lie whole in one window."""
        begin = first // BLOCK_BYTES * BLOCK_BYTES if self._verify else first
        return (begin + _SCRATCH_BYTES - first - extent) // row_stride + 1

    def load(self, begin: int, end: int) -> int:
        """Have payload bytes ``begin`` to ``end`` in scratch; returns where ``begin`` is."""
        worker = self._worker
        if self._verify:
            window_begin = begin // BLOCK_BYTES * BLOCK_BYTES
            window_end = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, self._payload_bytes)
        else:
            window_begin, window_end = begin, end
        kept = 0
        if self._begin <= window_begin < self._end:
            kept = min(self._end, window_end) - window_begin
            source = window_begin - self._begin
            if source:
                ctypes.memmove(worker.scratch_address, worker.scratch_address + source, kept)
        self._begin, self._end = window_begin, window_end
        position = window_begin + kept
        while position < window_end:
            stop = (
                min((position // BLOCK_BYTES + 1) * BLOCK_BYTES, window_end) if self._verify else window_end
            )
            target = worker.scratch[position - window_begin : stop - window_begin]
            if self._verify:
                crc = worker.read_steps(self._handle, self._origin + position, target)
                worker.source.check_block(worker.stats, self._chunk, position // BLOCK_BYTES, crc)
            else:
                self._handle.preadv([target], self._origin + position)
                worker.stats.bytes_read += len(target)
                worker.stats.blocks_unverified += self._worker.source.verify != "none"
            position = stop
        return begin - window_begin
