"""Chunks of a checkpoint's tensors: how each is stored, its checksum, and reads in batches of tiles.

The engine compares the checksums of blocks that one request has whole. So a request goes on to the end of
the last block that it begins, and what is then there too early is kept for the next one. Torch-free.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from dcp.inspection.values.elements import Array, stored_dtype
from dcp.planners.load.selection import Patterns, Selection
from dcp.storage.closable import Closable
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import BoxRequest, ByteRuns, ReadStats, Verify, put_at
from dcp.storage.errors import CorruptCheckpointError, PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.native.record_reader import locate_payload
from dcp.storage.formats.torch.zip_reader import Window
from dcp.storage.geometry.boxes import Box, contiguous_position
from dcp.storage.stores.base import Store

__all__ = ["BoxReads", "TensorSource", "Tile", "TileBatches", "TileRead"]

_OPENED_BYTES: Final = 1 << 20
"""Where requests are dear, to read a payload below this takes no longer than to open its record for the
checksum."""


class TensorSource(Closable):
    """One checkpoint and the engine that reads it. Use as a context manager; thread-safe.

    ``name`` is what the checkpoint is called in messages, if not by its store.
    """

    def __init__(
        self,
        store: Store,
        index: CheckpointIndex,
        *,
        verify: Verify = "blocks",
        threads: int | None = None,
        name: str | None = None,
    ) -> None:
        self.store = store
        self.index = index
        self.name = name or store.url
        threads = threads or store.read_profile.threads or 2
        self._engine = ReadEngine(store, index, verify=verify, threads=threads)
        self._running = threading.Lock()
        self._other_bytes = 0

    def close(self) -> None:
        """Close the files."""
        self._engine.close()

    def rows(self, only: Patterns | None, exclude: Patterns | None) -> list[int]:
        """The rows of the tensors that these patterns select. PlanError if they select none."""
        selection = Selection.of(only, exclude)
        rows = [row for row, fqn in enumerate(self.index.fqns) if selection is None or selection.selects(fqn)]
        if not rows and selection is not None:
            raise PlanError(
                f"{self.name}: only={only!r}, exclude={exclude!r} select none of its "
                f"{self.index.tensor_count} tensors; patterns are shell globs such as 'model.*' or '*.bias'"
            )
        return rows

    @property
    def stats(self) -> ReadStats:
        """Return what was read so far."""
        return self._engine.stats

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from storage so far; of records opened for their checksums, those asked for."""
        return self._engine.stats.bytes_read + self._other_bytes

    def count_bytes(self, size_bytes: int) -> None:
        """Note bytes of the checkpoint that were read by other means, for `bytes_read`."""
        self._other_bytes += size_bytes

    def window(self, file: int, offset: int, length: int) -> Window:
        """The bytes of a record, read and counted as they are asked for."""
        handle = self._engine.handle(file)

        def read(at: int, count: int) -> bytes:
            self._other_bytes += count
            return handle.pread(count, at)

        return Window(read, offset, length)

    def blob(self, file: int, offset: int, length: int) -> bytes:
        """The bytes of a value's record."""
        return self._engine.read_blob(file, offset, length)

    # -- checksums -------------------------------------------------------------------------------------------

    def is_c_ordered(self, chunk: int) -> bool:
        """Return whether a chunk's elements are stored in C order; may have to open its record."""
        return self.layout_of(chunk) is None

    def layout_of(self, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """None for C order; else dimensions from slowest to fastest, and the bytes from one element to the
        next along each. May have to open the chunk's record."""
        payloads = self._engine.payloads
        self._engine.resolve([chunk])
        return payloads.layout(chunk) if payloads.is_permuted(chunk) else None

    def payload_crc(self, chunk: int) -> int | None:
        """CRC-32 of a chunk's payload as it is stored, None where nobody noted it. No payload is read, but in
        a foreign checkpoint the record is opened."""
        index = self.index
        if index.payload_offsets[chunk] != UNKNOWN:
            return index.payload_crc(chunk)
        if self._engine.joins and index.payload_lengths[chunk] < _OPENED_BYTES:
            return None
        handle = self._engine.handle(int(index.chunk_files[chunk]))

        def read(offset: int, length: int) -> bytes:
            self._other_bytes += length
            return handle.pread(length, offset)

        begin, length = int(index.record_offsets[chunk]), int(index.record_lengths[chunk])
        stored = locate_payload(read, begin, length, fqn=index.fqns[int(index.chunk_tensors[chunk])])
        fills = stored.storage_offset_elements == 0 and stored.payload_bytes == index.payload_lengths[chunk]
        return stored.crc32 if fills else None

    def box(self, chunk: int, box: Box, address: int, strides: Sequence[int]) -> BoxRequest:
        """A box of a chunk, to memory at ``address`` with these ``strides`` in bytes."""
        self._engine.resolve([chunk])
        elements, order = self._engine.elements(chunk, *box)
        itemsize = self._engine.itemsize(chunk)
        return BoxRequest(elements, put_at(address, itemsize, [strides[d] for d in order]))

    def run(self, runs: ByteRuns, boxes: Sequence[BoxRequest]) -> None:
        """Have the engine carry out a request; one at a time."""
        with self._running:
            self._engine.run(runs, boxes)

    def block_end(self, chunk: int, position: int) -> int:
        """The end of the block that has the payload byte before ``position``. It is the payload's end if
        so little is left that the engine would not compare its checksum."""
        payload_bytes = int(self.index.payload_lengths[chunk])
        end = -(-position // BLOCK_BYTES) * BLOCK_BYTES
        small_bytes = min(self.store.read_profile.join_below_bytes, BLOCK_BYTES)
        return payload_bytes if payload_bytes - end <= small_bytes else end

    def is_checked_whole(self, chunk: int) -> bool:
        """Return whether a payload has no checksums of blocks, so that one for all of it is to be
        compared."""
        return self._engine.verify != "none" and not len(self.index.block_crcs(chunk))

    def check_whole(self, chunk: int, got: int) -> None:
        """Compare the checksum of a payload that was read in several requests, if anybody noted one."""
        expected = self.payload_crc(chunk)
        if expected not in (None, got):
            fqn = self.index.fqns[int(self.index.chunk_tensors[chunk])]
            name = self.index.files[int(self.index.chunk_files[chunk])]
            raise CorruptCheckpointError(
                f"{self.name}: tensor {fqn!r} is damaged: CRC-32 {got:08x} of its bytes in {name}, "
                f"which says {expected:08x}. Take another checkpoint.",
                path=f"{self.store.url}/{name}",
                fqn=fqn,
            )


class Tile(NamedTuple):
    """A box of a tensor: ``array``, C-ordered, begins at ``offsets``."""

    offsets: tuple[int, ...]
    array: Array


class TileRead(NamedTuple):
    """A tile to be read: the box ``at`` of a chunk, whose first element is at ``offsets`` of the tensor.

    ``begin`` and ``end`` are its payload bytes where it is one run of them (else -1), in the chunk's own
    ``order`` of dimensions if that is not C. ``follows``: the next tile goes on where this one ends.
    """

    tensor: int
    chunk: int
    offsets: tuple[int, ...]
    at: Box
    begin: int
    end: int
    order: tuple[int, ...] | None
    follows: bool


class BoxReads:
    """Boxes of chunks and where they go, carried out together."""

    def __init__(self, reader: TensorSource) -> None:
        self._reader = reader
        self._runs: list[tuple[int, int, int, int]] = []
        self._boxes: list[BoxRequest] = []
        self._kept: list[Array] = []  # alive until all is read
        self.size_bytes = 0

    def add(self, chunk: int, box: Box, target: Array) -> None:
        """``box`` of ``chunk`` to ``target``, which has its shape and any strides."""
        sizes = self._reader.index.box(chunk).sizes
        position = contiguous_position(sizes, box) if target.flags.c_contiguous else None
        if position is not None and self._reader.is_c_ordered(chunk):
            self.add_run(chunk, position * target.itemsize, target)
        else:
            self._boxes.append(self._reader.box(chunk, box, target.ctypes.data, target.strides))
            self._keep(target)

    def add_run(self, chunk: int, begin: int, target: Array) -> None:
        """Bytes of a payload from ``begin`` on to ``target``, which is contiguous."""
        if target.nbytes:
            self._runs.append((chunk, begin, target.nbytes, target.ctypes.data))
            self._keep(target)

    def _keep(self, target: Array) -> None:
        self._kept.append(target)
        self.size_bytes += target.nbytes

    def carry_out(self) -> None:
        """Read all of it."""
        columns = zip(*self._runs, strict=True) if self._runs else [()] * 4
        runs = ByteRuns(*(np.array(column, dtype=np.int64) for column in columns))
        self._reader.run(runs, self._boxes)


class TileBatches:
    """Tiles read in batches of up to ``max_bytes``, one after the other."""

    def __init__(self, reader: TensorSource, pieces: Iterator[TileRead], max_bytes: int) -> None:
        self._reader = reader
        self._pieces = pieces
        self._max_bytes = max_bytes
        self._next: TileRead | None = next(pieces, None)
        self._early: tuple[int, int, Array] = (-1, 0, np.empty(0, np.uint8))
        self._sum: tuple[int, int, int] = (-1, 0, 0)  # chunk, position, CRC-32 of the bytes before

    @property
    def at_end(self) -> bool:
        """Return whether there are no more."""
        return self._next is None

    def __iter__(self) -> TileBatches:
        return self

    def __next__(self) -> list[tuple[int, Tile]]:
        if self._next is None:
            raise StopIteration
        request = BoxReads(self._reader)
        buffers: list[tuple[TileRead, Array]] = []
        total = 0
        while self._next is not None:
            piece = self._next
            size = piece.at.volume * self._reader.index.dtype(piece.tensor).itemsize
            if buffers and (total + size > self._max_bytes or buffers[-1][0].follows):
                break
            buffers.append((piece, self._prepare(piece, size, request)))
            total += size
            self._next = next(self._pieces, None)
        request.carry_out()
        return [self._tile(piece, buffer) for piece, buffer in buffers]

    def _prepare(self, piece: TileRead, size: int, request: BoxReads) -> Array:
        """Memory for a piece (bytes, perhaps more than it has), what is known of it, and a request for the
        rest."""
        if piece.begin < 0:
            buffer = np.empty(size, np.uint8)
            dtype = stored_dtype(self._reader.index.dtype(piece.tensor))
            request.add(piece.chunk, piece.at, buffer.view(dtype).reshape(piece.at.sizes))
            return buffer
        chunk, position, early = self._early
        if chunk != piece.chunk or position != piece.begin:
            early = early[:0]
        end = self._reader.block_end(piece.chunk, piece.end) if piece.follows else piece.end
        buffer = np.empty(max(end - piece.begin, len(early)), np.uint8)
        buffer[: len(early)] = early
        request.add_run(piece.chunk, piece.begin + len(early), buffer[len(early) :])
        return buffer

    def _tile(self, piece: TileRead, buffer: Array) -> tuple[int, Tile]:
        dtype = stored_dtype(self._reader.index.dtype(piece.tensor))
        sizes, order = piece.at.sizes, piece.order
        own = buffer[: piece.at.volume * dtype.itemsize]
        if piece.begin >= 0:
            self._early = (piece.chunk, piece.end, buffer[len(own) :].copy())
            self._check(piece, own)
        if order is None or piece.begin < 0:
            return piece.tensor, Tile(piece.offsets, own.view(dtype).reshape(sizes))
        stored = own.view(dtype).reshape([sizes[d] for d in order])
        array = np.ascontiguousarray(stored.transpose(np.argsort(order)))
        return piece.tensor, Tile(piece.offsets, array)

    def _check(self, piece: TileRead, own: Array) -> None:
        """The checksum of a whole payload, which the engine does not compare if it sees it in pieces."""
        begins = piece.begin == 0 and piece.follows
        if not begins and self._sum[:2] != (piece.chunk, piece.begin):
            return
        if not self._reader.is_checked_whole(piece.chunk):
            return
        crc = crc32(own.data, 0 if begins else self._sum[2])
        self._sum = (piece.chunk, piece.end, crc)
        if not piece.follows:
            self._reader.check_whole(piece.chunk, crc)
