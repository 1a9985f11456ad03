"""One reading thread: requests are hashed and handed out as they come, while a cache still has them."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from dcp.storage.engine.memory import ScratchBuffers, view
from dcp.storage.engine.reading.coalescing import NO_CHUNK, Cluster, JoinedRequest, RequestPiece
from dcp.storage.engine.reading.fragments import within_blocks
from dcp.storage.engine.reading.requests import ByteRuns, ReadStats
from dcp.storage.engine.reading.source import ReadSource
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.stores.handles import ReadHandle

__all__ = ["SCRATCH", "ReadWorker"]

_STEP_BYTES = 1 << 20
"""Bytes that are received before they are hashed, and that are received for nothing at a time."""

SCRATCH = ScratchBuffers(4 * BLOCK_BYTES)
"""Those of all threads of the process that read."""


class ReadWorker:
    """One thread's tools: scratch memory that is used again, and its own figures."""

    def __init__(self, source: ReadSource, buffers: ScratchBuffers) -> None:
        self.source = source
        self.stats = ReadStats()
        self._buffers = buffers
        self._scratch = memoryview(b"")

    def room(self, size_bytes: int) -> tuple[memoryview, int]:
        """Scratch memory of ``size_bytes``, and its address; what was in it is gone."""
        if size_bytes > len(self._scratch):
            self.release()
            self._scratch = self._buffers.get(size_bytes)
        return self._scratch[:size_bytes], ctypes.addressof(ctypes.c_char.from_buffer(self._scratch))

    def release(self) -> None:
        """Give the scratch memory back."""
        self._buffers.put(self._scratch)
        self._scratch = memoryview(b"")

    def carry_out(self, request: JoinedRequest) -> None:
        """Read, check, and hand out."""
        handle = self.source.handle(request.file)
        streaming = _StreamingRead(request, self)
        if streaming.follows:
            handle.receive(streaming, request.begin)
        else:
            streaming.read_whole(handle)
        self.stats.bytes_read += request.end - request.begin
        streaming.check()


class _StreamingRead:
    """The `Inflow` of a request. Large pieces go where they belong, the others through scratch memory.

    Nothing is compared before `check`: what was fetched by an attempt that failed does not count.
    """

    def __init__(self, request: JoinedRequest, worker: ReadWorker) -> None:
        self.size_bytes = request.end - request.begin
        self._request = request
        self._worker = worker
        self._verify = worker.source.verify != "none"
        self._pieces = [*heapq.merge(request.direct, request.copied, key=attrgetter("offset"))]
        self.follows = True
        """No piece has bytes of another one, so that each is done with once it has come."""
        self._copied_bytes = end = 0
        for piece in self._pieces:
            self.follows &= end <= piece.offset
            end = piece.offset + piece.size_bytes
        for piece in request.copied:
            self._copied_bytes = max(self._copied_bytes, piece.size_bytes)
        self._findings: list[Callable[[], None]] = []
        self._clusters: list[tuple[ByteRuns, npt.NDArray[np.uint32]]] = []

    def buffers(self) -> Iterator[memoryview]:
        """Yield memory for one attempt."""
        self._findings, self._clusters = [], []
        direct, worker = set(map(id, self._request.direct)), self._worker
        position = self._request.begin
        for piece in self._pieces:
            while position < piece.offset:
                step = min(piece.offset - position, _STEP_BYTES)
                yield worker.room(step)[0]
                position += step
            if id(piece) in direct:
                yield from self._filled(piece, view(piece.address, piece.size_bytes))
            else:
                room, address = worker.room(self._copied_bytes)
                data = room[: piece.size_bytes]
                yield from self._filled(piece, data)
                self._hand_out(piece, data, address)
            position = piece.offset + piece.size_bytes

    def read_whole(self, handle: ReadHandle) -> None:
        """Read all of it before anything is handed out."""
        self._findings, self._clusters = [], []
        data, address = self._worker.room(self.size_bytes)
        handle.preadv([data], self._request.begin)
        for piece in self._pieces:
            at = piece.offset - self._request.begin
            own = data[at : at + piece.size_bytes]
            for _ in self._filled(piece, own):
                pass
            self._hand_out(piece, own, address + at)

    def check(self) -> None:
        """Compare the checksums of what has come. Raises CorruptCheckpointError."""
        for compare in self._findings:
            compare()
        if self._clusters:  # together, for there may be hundreds of them
            runs, crcs = zip(*self._clusters, strict=True)
            self._worker.source.check_runs(self._worker.stats, ByteRuns.joined(runs), np.concatenate(crcs))

    def _filled(self, piece: RequestPiece, memory: memoryview) -> Iterator[memoryview]:
        """Yield the memory of a piece in steps, which are hashed once they have come."""
        if not self._verify or piece.chunk == NO_CHUNK:
            yield memory
            return
        for begin, end in within_blocks(len(memory), piece.position):
            crc = 0
            for at in range(begin, end, _STEP_BYTES):
                step = memory[at : min(at + _STEP_BYTES, end)]
                yield step
                crc = crc32(step, crc)
            self._note(piece.chunk, piece.position + begin, end - begin, crc)

    def _hand_out(self, piece: RequestPiece, data: memoryview, address: int) -> None:
        put = piece.put
        if isinstance(put, Cluster):
            crcs = put.copy_out(address, data if self._verify else None)
            if self._verify:
                self._clusters.append((put.members.runs, crcs))
            return
        if put is None:
            ctypes.memmove(piece.address, address, piece.size_bytes)
        else:
            put(data)

    def _note(self, chunk: int, position: int, size_bytes: int, crc: int) -> None:
        worker = self._worker
        self._findings.append(
            partial(worker.source.check_part, worker.stats, chunk, position, size_bytes, crc)
        )
