"""Tensors of any checkpoint as numpy arrays: whole ones tile by tile in bounded memory, or parts of them.

Torch-free. How a tensor is sharded, and in which order its payloads lie, is not seen any more; checksums are
compared on the way.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from operator import itemgetter
from types import EllipsisType
from typing import Any, Final, TypeAlias

import numpy as np

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.findings import ReportBytes
from dcp.inspection.values.elements import Array, stored_dtype
from dcp.inspection.values.strided_selection import ChunkPart, StridedSelection, covering_boxes, select
from dcp.inspection.values.tensor_source import BoxReads, TensorSource, Tile, TileBatches, TileRead
from dcp.storage.engine.reading.requests import Verify
from dcp.storage.errors import CorruptCheckpointError
from dcp.storage.formats.opening.sources import open_source
from dcp.storage.geometry.boxes import Box, contiguous_position, split_box
from dcp.storage.geometry.joins import disjoint
from dcp.storage.geometry.strides import dense_order
from dcp.storage.stores.opening import OpenWith
from dcp.storage.threads import WorkerThreads

__all__ = ["MAX_TILE_BYTES", "Slices", "TensorReader", "Tile", "open_tensors"]

MAX_TILE_BYTES: Final = 16 << 20

Slices: TypeAlias = tuple[slice | int | EllipsisType, ...]

_RESOLVED_TENSORS: Final = 1000
"""Records of foreign checkpoints are opened together, for as many tensors."""


@plain_errors
def open_tensors(
    checkpoint_id: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    verify: Verify = "blocks",
) -> TensorReader:
    """A `TensorReader` of a checkpoint of any format, which `dcp.storage.formats.opening.sources` finds.

    Args:
        checkpoint_id: A path or URL.
        storage_options: Of the file system of a URL, as for `dcp.save`.
        verify: "blocks" compares the checksum of every block that is read whole, "full" also fetches the rest
            of blocks that are needed in part, "none" compares nothing.

    Returns:
        The reader, a context manager.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointFormatError: Its metadata is damaged, or not of a format that is known.
    """
    source = open_source(checkpoint_id, open_store=OpenWith(storage_options))
    return TensorReader(source.store, source.index, verify=verify, name=source.name)


class TensorReader(TensorSource):
    """Reads tensors of one checkpoint by their row in its index. Use as a context manager; thread-safe.

    Elements are as `dcp.inspection.values.elements.stored_dtype` says: numpy's own types, or unsigned
    integers for those that numpy lacks, which `dcp.inspection.values.elements.decode` makes numbers of.
    Raises `CorruptCheckpointError` where bytes are not those committed: what ``verify`` tells to check.
    """

    # -- whole tensors ---------------------------------------------------------------------------------------

    def tiles(self, tensor_row: int, max_bytes: int = MAX_TILE_BYTES) -> Iterator[Tile]:
        """All elements of a tensor, each exactly once, in tiles of up to ``max_bytes``.

        Tiles come chunk by chunk. Memory is bounded by twice ``max_bytes`` and the 4 MiB of checksummed
        blocks that they end in. A tensor without elements has no tiles. Raises `CorruptCheckpointError` if
        the checkpoint lacks a part of the tensor.
        """
        for _, tile in self.stream([tensor_row], max_bytes):
            yield tile

    def stream(
        self, tensor_rows: Iterable[int], max_bytes: int = MAX_TILE_BYTES
    ) -> Generator[tuple[int, Tile], None, None]:
        """`tiles` of several tensors, with their rows; small neighbours are read together.

        While the caller is busy with one batch of tiles the next is being read.
        """
        batches = TileBatches(self, self._pieces(tensor_rows, max_bytes), max_bytes)
        batch = next(batches, None)
        if batches.at_end:  # no thread for what is read already
            yield from batch or ()
            return
        with WorkerThreads(1, "dcp-ahead") as pool:
            while batch is not None:
                ahead: Future[list[tuple[int, Tile]] | None] = pool.submit(next, batches, None)
                yield from batch
                batch = ahead.result()

    def tiles_of(
        self, tensor_rows: Sequence[int], progress: ReportBytes | None = None
    ) -> Iterator[tuple[int, Iterator[Tile]]]:
        """`stream`, by tensors; ``progress`` is called after each tile."""
        done, total = 0, sum(map(self.tensor_bytes, tensor_rows))

        def counted(tiles: Iterable[tuple[int, Tile]]) -> Iterator[Tile]:
            nonlocal done
            for _, tile in tiles:
                yield tile
                done += tile.array.nbytes
                if progress is not None:
                    progress(done, total)

        for row, tiles in itertools.groupby(self.stream(tensor_rows), itemgetter(0)):
            yield row, counted(tiles)

    def tensor_bytes(self, tensor_row: int) -> int:
        """Bytes of a tensor's elements."""
        return math.prod(self.index.shape(tensor_row)) * self.index.dtype(tensor_row).itemsize

    def parts(self, tensor_row: int) -> list[ChunkPart]:
        """The boxes of a tensor's chunks without what another one has already, in ascending order.

        Raises `CorruptCheckpointError` if they are not all of the tensor.
        """
        index = self.index
        shape, chunks = index.shape(tensor_row), index.chunks(tensor_row)
        found = disjoint([index.box(chunk) for chunk in chunks])
        covered = sum(box.volume for _, box in found)
        if covered != math.prod(shape):
            raise CorruptCheckpointError(
                f"{self.name}: there are {covered} of {math.prod(shape)} elements of "
                f"{index.fqns[tensor_row]!r}, whose shape is {shape}: a part of the checkpoint is missing",
                path=self.name,
                fqn=index.fqns[tensor_row],
            )
        return [ChunkPart(chunks[number], box) for number, box in found]

    def _pieces(self, tensor_rows: Iterable[int], max_bytes: int) -> Iterator[TileRead]:
        rows = iter(tensor_rows)
        while some := list(itertools.islice(rows, _RESOLVED_TENSORS)):
            parts = [(row, part) for row in some for part in self.parts(row)]
            self._engine.resolve([part.chunk for _, part in parts])
            for row, part in parts:
                yield from self._split(row, part, max_bytes)

    def _split(self, row: int, part: ChunkPart, max_bytes: int) -> Iterator[TileRead]:
        """Pieces of a part in the order in which its bytes lie, so that nothing is read twice."""
        index, chunk = self.index, part.chunk
        itemsize, (origin, sizes) = index.dtype(row).itemsize, index.box(chunk)
        order = self._order(chunk)
        turn = order or tuple(range(len(sizes)))
        back = tuple(np.argsort(turn).tolist())
        stored_sizes = tuple(sizes[d] for d in turn)
        is_dense = order is not None or self.is_c_ordered(chunk)
        for box in split_box(part.box.seen_from(origin).permuted(turn), max(1, max_bytes // itemsize)):
            position = contiguous_position(stored_sizes, box) if is_dense else None
            begin = -1 if position is None else position * itemsize
            end = -1 if position is None else begin + box.volume * itemsize
            is_last = part.box.sizes != sizes or end >= int(index.payload_lengths[chunk])
            at = box.permuted(back)
            yield TileRead(
                row,
                chunk,
                at.moved(origin).offsets,
                at,
                begin,
                end,
                order,
                position is not None and not is_last,
            )

    def _order(self, chunk: int) -> tuple[int, ...] | None:
        """Dimensions from slowest to fastest where the payload is dense, but not C-ordered."""
        strides = self.index.payload_strides.get(chunk)
        if strides is None:
            return self._engine.payloads.order(chunk)
        return dense_order(self.index.box(chunk).sizes, strides)

    # -- parts of tensors ------------------------------------------------------------------------------------

    def read(self, tensor_row: int, slices: Slices | None = None) -> Array:
        """A tensor, or what ``slices`` take of it as numpy would; only the bytes that this needs are read,
        and blocks that are not read whole are not checked, unless the reader has ``verify="full"``.

        Slices may have negative bounds and steps; there may be fewer than dimensions, and one ellipsis.
        Raises `PlanError` for what numpy would not take either.
        """
        return self._read(tensor_row, self._selection(tensor_row, slices))

    def shape_of(self, tensor_row: int, slices: Slices | None = None) -> tuple[int, ...]:
        """The shape of what `read` gives; nothing is read."""
        return self._selection(tensor_row, slices).shape

    def read_part(self, tensor_row: int, slices: Slices | None, part: Sequence[slice]) -> Array:
        """``read(tensor_row, slices)[part]``, of which nothing else is read; ``part`` has a slice of step 1
        for each dimension."""
        return self._read(tensor_row, self._selection(tensor_row, slices).part(part))

    def slabs(self, tensor_row: int, slices: Slices | None = None) -> Iterator[Array]:
        """The same as `read`, in parts along the first dimension that is left, of about `MAX_TILE_BYTES`."""
        selection = self._selection(tensor_row, slices)
        for slab in selection.slabs(MAX_TILE_BYTES // self.index.dtype(tensor_row).itemsize):
            yield self._read(tensor_row, slab)

    def _selection(self, tensor_row: int, slices: Slices | None) -> StridedSelection:
        return select(self.index.shape(tensor_row), slices, self.index.fqns[tensor_row])

    def _read(self, tensor_row: int, selection: StridedSelection) -> Array:
        index = self.index
        parts = self.parts(tensor_row)  # first, because no memory is taken on the word of a shape alone
        result = np.empty(selection.counts, stored_dtype(index.dtype(tensor_row)))
        if result.size:
            self._engine.resolve([part.chunk for part in parts])
            if max(selection.steps, default=1) == 1:
                self._read_direct(parts, selection, result)
            else:
                self._read_covering(parts, selection, result)
        return selection.finish(result)

    def _read_direct(self, parts: Sequence[ChunkPart], selection: StridedSelection, result: Array) -> None:
        """Each box straight into its place in ``result``."""
        request = BoxReads(self)
        for part in parts:
            for box, place in covering_boxes(part, selection, result.itemsize, result.nbytes):
                request.add(part.chunk, self._within(part.chunk, box), _at(result, place))
        request.carry_out()

    def _read_covering(self, parts: Sequence[ChunkPart], selection: StridedSelection, result: Array) -> None:
        """Boxes that cover every step-th element, of which those are then taken."""
        request = BoxReads(self)
        copies: list[tuple[Array, Array]] = []
        for part in parts:
            for box, place in covering_boxes(part, selection, result.itemsize, MAX_TILE_BYTES):
                scratch = np.empty(box.sizes, result.dtype)
                request.add(part.chunk, self._within(part.chunk, box), scratch)
                taken = scratch[tuple(slice(None, None, step) for step in selection.steps)]
                copies.append((_at(result, place), taken))
                if request.size_bytes >= MAX_TILE_BYTES:
                    request = self._finish_copies(request, copies)
        self._finish_copies(request, copies)

    def _finish_copies(self, request: BoxReads, copies: list[tuple[Array, Array]]) -> BoxReads:
        request.carry_out()
        for target, source in copies:
            target[...] = source
        copies.clear()
        return BoxReads(self)

    def _within(self, chunk: int, box: Box) -> Box:
        """A box of the tensor as one of a chunk."""
        return box.seen_from(self.index.box(chunk).offsets)


def _at(array: Array, place: tuple[slice, ...]) -> Array:
    """A view also of an array without dimensions, of which numpy's index gives a copy."""
    return array[place] if place else array
