"""Tensors in tiles: what is to be read of them, and how it is read in batches. Torch-free.

The engine compares the checksums of blocks that one request has whole. So a request goes on to the end of
the last block that it begins, and what is then there too early is kept for the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dcp.inspection.values.elements import Array, stored_dtype
from dcp.inspection.values.tensor_source import TensorSource
from dcp.storage.engine.reading.requests import BoxRequest, ByteRuns
from dcp.storage.formats.checksums import crc32
from dcp.storage.geometry.boxes import Box, contiguous_position

__all__ = ["BoxReads", "Tile", "TileBatches", "TileRead"]


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
        """Whether there are no more."""
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
