"""Tensors of any checkpoint as numpy arrays: whole tensors tile by tile in bounded memory, or slices.

Torch-free. Results do not depend on sharding or payload order. Checksums are verified during the read.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import EllipsisType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from dcp.inspection.values.elements import Array, stored_dtype
from dcp.planners.load.selection import Patterns, Selection
from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import BoxRequest, ByteRuns, Elements, Verify, put_at
from dcp.storage.errors import CorruptCheckpointError, PlanError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.opening import open_source
from dcp.storage.formats.torch.archive import Window, locate_payload
from dcp.storage.geometry.boxes import Box, contiguous_position, disjoint, range_boxes, split_box
from dcp.storage.geometry.strides import dense_order
from dcp.storage.stores.base import Closable, Store
from dcp.storage.stores.opening import OpenWith
from dcp.storage.threads import WorkerThreads

ReportBytes = Callable[[int, int], None]
"""Function of (bytes done, total bytes), called from any thread, one call at a time."""

TILE_BYTES: Final = 16 << 20
"""Bytes read at once: whole blocks, for the engine to verify."""

Slices: TypeAlias = tuple[slice | int | EllipsisType, ...]

_RESOLVED_TENSORS: Final = 1000
"""Records of foreign checkpoints are opened together, for as many tensors."""

_SKIPPED_BYTES: Final = 64 << 10
"""Rows of a strided slice with larger gaps are requested separately."""
_MAX_SKIPS: Final = 1 << 16

_OPENED_BYTES: Final = 1 << 20
"""Payloads up to this size are read completely if requests are expensive, instead of opening the record."""


# -- selections ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StridedSelection:
    """Elements selected by slices: one range in each dimension, possibly reversed. ``dropped`` are dimensions
    indexed by a number."""

    ranges: tuple[range, ...]
    dropped: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return tuple(len(one) for one, drop in zip(self.ranges, self.dropped, strict=True) if not drop)

    def finish(self, array: Array) -> Array:
        """Return the result from its elements in ascending order."""
        turned = array[tuple(slice(None, None, 1 if one.step > 0 else -1) for one in self.ranges)]
        return np.ascontiguousarray(turned).reshape(self.shape)

    def within(self, box: Box) -> tuple[tuple[int, ...], tuple[slice, ...]] | None:
        """Return the first selected element inside ``box``, and the positions of all in the result; None if
        empty."""
        offsets, places = [], []
        for low, high, one in zip(box.offsets, box.high, self.ranges, strict=True):
            ascending = one if one.step > 0 else one[::-1]
            first, step = ascending.start, ascending.step
            begin, end = max(0, -((first - low) // step)), min(len(one), -((first - high) // step))
            if begin >= end:
                return None
            offsets.append(ascending[begin])
            places.append(slice(begin, end))
        return tuple(offsets), tuple(places)

    def part(self, places: Sequence[slice]) -> StridedSelection:
        """Select a part: ``places`` have step 1, for the first dimensions of the result."""
        left = iter(places)
        pairs = zip(self.ranges, self.dropped, strict=True)
        return replace(
            self, ranges=tuple(one if drop else one[next(left, slice(None))] for one, drop in pairs)
        )


def select(shape: tuple[int, ...], slices: tuple[object, ...] | None, fqn: str) -> StridedSelection:
    """Select ``slices`` of a tensor of ``shape``. Raises PlanError for too many, wrong kinds, bad bounds."""
    slices = slices or ()
    places = [place for place, item in enumerate(slices) if item is Ellipsis]
    given, ndim = len(slices) - len(places), len(shape)
    if given > ndim or len(places) > 1:
        raise PlanError(f"{fqn!r} has {ndim} dimensions, but the slice {_shown(slices)} has more", fqn=fqn)
    place = places[0] if places else len(slices)
    items = [*slices[:place], *[slice(None)] * (ndim - given), *slices[place + len(places) :]]
    ranges = [_along(item, size, dim, fqn) for dim, (item, size) in enumerate(zip(items, shape, strict=True))]
    return StridedSelection(tuple(ranges), tuple(not isinstance(item, slice) for item in items))


def _along(item: Any, size: int, dim: int, fqn: str) -> range:
    try:
        taken = range(size)[item]
    except IndexError as error:
        message = f"{fqn!r}: index {item} is out of range for dimension {dim} with {size} elements"
        raise PlanError(message, fqn=fqn) from error
    except (TypeError, ValueError) as error:
        message = f"{fqn!r}: indices must be slices or integers, not {_shown((item,))}: {error}"
        raise PlanError(message, fqn=fqn) from error
    if isinstance(taken, int):
        return range(taken, taken + 1)
    return taken if len(taken) > 1 else range(taken[0], taken[0] + 1) if taken else range(0)


def _shown(slices: tuple[object, ...]) -> str:
    shown = []
    for item in slices:
        bounds = (item.start, item.stop, item.step) if isinstance(item, slice) else (item,)
        text = ":".join("" if one is None else "..." if one is Ellipsis else str(one) for one in bounds)
        shown.append(text.removesuffix(":"))
    return ",".join(shown)


# -- readers -------------------------------------------------------------------------------------------------


@contextmanager
def opened(
    checkpoint: str | os.PathLike[str] | TensorReader, storage_options: Mapping[str, Any] | None = None
) -> Iterator[TensorReader]:
    """Open a checkpoint of any format found by `dcp.storage.formats.opening`, to read tensors.

    Touched blocks are fetched whole and verified. A reader is yielded unchanged and stays open. Raises
    CheckpointNotFoundError for a missing checkpoint, and CheckpointFormatError for damaged or unknown
    metadata.
    """
    if isinstance(checkpoint, TensorReader):
        yield checkpoint
        return
    source = open_source(checkpoint, open_store=OpenWith(storage_options))
    with TensorReader(source.store, source.index, verify="full", name=source.name) as reader:
        yield reader


class Tile(NamedTuple):
    """A box of the tensor ``row``: the C-ordered ``array`` begins at ``offsets``."""

    row: int
    offsets: tuple[int, ...]
    array: Array


class _TileRead(NamedTuple):
    """A read of ``size_bytes`` of a chunk, which become the tiles of ``boxes``.

    Dimensions go from the slowest to the fastest; ``back`` restores the tensor's order. ``begin`` is the
    first byte of the payload, or -1 for a box.
    """

    row: int
    chunk: int
    back: tuple[int, ...]
    boxes: Sequence[Box]
    begin: int
    size_bytes: int


_Run: TypeAlias = tuple[int, int, int, int]
"""Bytes of a payload, as `ByteRuns` has them by column."""

_Wanted: TypeAlias = tuple[int, Sequence[int], Sequence[int], Array]
"""Elements of a chunk for an array: first offsets and steps."""


class TensorReader(Closable):
    """Read tensors of one checkpoint by row. Use as a context manager; thread-safe.

    Elements have the dtype of `dcp.inspection.values.elements.stored_dtype`; use
    `dcp.inspection.values.elements.decode` for numbers. ``verify`` decides the checks: "blocks" verifies
    blocks read whole, "full" also fetches the rest of partly needed blocks, "none" skips checksums.
    Mismatches raise `CorruptCheckpointError`. ``name`` replaces the store's name in messages.
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
        self.other_bytes = 0
        """Bytes of the checkpoint read by other means, added to `bytes_read`."""

    def close(self) -> None:
        """Close the files."""
        self._engine.close()

    def rows(self, only: Patterns | None, exclude: Patterns | None) -> list[int]:
        """Return the rows selected by patterns. PlanError if empty."""
        selection = Selection.of(only, exclude)
        rows = [row for row, fqn in enumerate(self.index.fqns) if selection is None or selection.selects(fqn)]
        if not rows and selection is not None:
            raise PlanError(
                f"{self.name}: the patterns ({selection}) select none of its {self.index.tensor_count} "
                "tensors; patterns are shell globs such as 'model.*' or '*.bias'"
            )
        return rows

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from storage, including requested bytes of opened records."""
        return self._engine.stats.bytes_read + self.other_bytes

    def window(self, file: int, offset: int, length: int) -> Window:
        """Return the bytes of a record, read and counted as they are asked for."""
        return Window(partial(self._read_counted, file), offset, length)

    def _read_counted(self, file: int, offset: int, length: int) -> bytes:
        self.other_bytes += length
        return self._engine.handle(file).pread(length, offset)

    def blob(self, file: int, offset: int, length: int) -> bytes:
        """Return the bytes of a value's record."""
        return self._engine.read_blob(file, offset, length)

    def check_files(self, fqns: Iterable[str]) -> None:
        """Check the files of these tensors and values, with one request for each file.

        Raises `CorruptCheckpointError` for a missing file or a wrong size.
        """
        index, files = self.index, set[int]()
        for fqn in fqns:
            row, value = index.position.get(fqn), index.objects.position.get(fqn)
            if row is not None:
                files.update(int(index.chunk_files[chunk]) for chunk in index.chunks(row))
            if value is not None:
                files.add(int(index.objects.files[value]))
        self._engine.check_files(sorted(files - {UNKNOWN}))

    # -- chunks ----------------------------------------------------------------------------------------------

    def is_c_ordered(self, chunk: int) -> bool:
        """Test whether a chunk is stored in C order; may open its record."""
        return self.layout_of(chunk) is None

    def layout_of(self, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return None for C order, else dimensions from slowest to fastest and byte strides. May open the
        chunk's record."""
        payloads = self._engine.payloads
        self._engine.resolve([chunk])
        return payloads.layout(chunk) if payloads.is_permuted(chunk) else None

    def payload_crc(self, chunk: int) -> int | None:
        """Return the stored CRC-32 of a chunk's payload, or None. Foreign records are opened; payloads are
        not read."""
        index = self.index
        if index.payload_offsets[chunk] != UNKNOWN:
            return index.payload_crc(chunk)
        if self._engine.joins and index.payload_lengths[chunk] < _OPENED_BYTES:
            return None
        begin, length = int(index.record_offsets[chunk]), int(index.record_lengths[chunk])
        read = partial(self._read_counted, int(index.chunk_files[chunk]))
        stored = locate_payload(read, begin, length, fqn=index.fqns[int(index.chunk_tensors[chunk])])
        fills = stored.storage_offset == 0 and stored.storage_bytes == index.payload_lengths[chunk]
        return stored.crc32 if fills else None

    def parts(self, tensor_row: int) -> list[tuple[int, Box]]:
        """Return the chunks of a tensor in ascending order, with disjoint boxes.

        Raises `CorruptCheckpointError` for an incomplete tensor.
        """
        index = self.index
        shape, chunks = index.shape(tensor_row), index.chunks(tensor_row)
        found = disjoint([index.box(chunk) for chunk in chunks])
        covered = sum(box.volume for _, box in found)
        if covered != math.prod(shape):
            raise CorruptCheckpointError(
                f"{self.name} has only {covered} of {math.prod(shape)} elements of "
                f"{index.fqns[tensor_row]!r} of shape {shape}: a part of the checkpoint is missing",
                path=self.name,
                fqn=index.fqns[tensor_row],
            )
        return [(chunks[number], box) for number, box in found]

    def tensor_bytes(self, tensor_row: int) -> int:
        """Return bytes of a tensor's elements."""
        return math.prod(self.index.shape(tensor_row)) * self.index.dtype(tensor_row).itemsize

    # -- whole tensors ---------------------------------------------------------------------------------------

    def stream(self, tensor_rows: Iterable[int], tile_bytes: int = TILE_BYTES) -> Generator[Tile, None, None]:
        """Yield all elements of tensors, each once, in tiles of up to ``tile_bytes`` (a multiple of the block
        size).

        Tiles follow the chunks; small neighbours share a request, and reads run ahead of the caller. An empty
        tensor has no tiles. Raises `CorruptCheckpointError` for an incomplete tensor.
        """
        batches = self._batches(self._reads(tensor_rows, tile_bytes), tile_bytes)
        with WorkerThreads(1, "dcp-ahead") as pool:
            batch = next(batches, None)
            while batch is not None:
                ahead = pool.submit(next, batches, None)
                yield from batch
                batch = ahead.result()

    def tiles_of(
        self, tensor_rows: Sequence[int], progress: ReportBytes | None = None
    ) -> Iterator[tuple[int, Iterator[Tile]]]:
        """`stream`, by tensors; ``progress`` is called after each tile."""
        done, total = 0, sum(map(self.tensor_bytes, tensor_rows))

        def counted(tiles: Iterable[Tile]) -> Iterator[Tile]:
            nonlocal done
            for tile in tiles:
                yield tile
                done += tile.array.nbytes
                if progress is not None:
                    progress(done, total)

        for row, tiles in itertools.groupby(self.stream(tensor_rows), attrgetter("row")):
            yield row, counted(tiles)

    def _reads(self, tensor_rows: Iterable[int], tile_bytes: int) -> Iterator[_TileRead]:
        rows = iter(tensor_rows)
        while some := list(itertools.islice(rows, _RESOLVED_TENSORS)):
            parts = [(row, *part) for row in some for part in self.parts(row)]
            self._engine.resolve([chunk for _, chunk, _ in parts])
            for row, chunk, box in parts:
                yield from self._reads_of(row, chunk, box, tile_bytes)

    def _reads_of(self, row: int, chunk: int, part: Box, tile_bytes: int) -> Iterator[_TileRead]:
        """Yield reads of a part in byte order: ranges of a whole dense payload, else boxes."""
        itemsize = self.index.dtype(row).itemsize
        origin, sizes = self.index.box(chunk)
        order = self._engine.payloads.layout(chunk)[0]
        strides = self.index.payload_strides.get(chunk)
        dense = (
            order if strides is None else dense_order(sizes, strides)
        )  # None: bytes of none of the elements
        if dense is None or part.sizes != sizes:
            back = tuple(np.argsort(order).tolist())
            for box in split_box(part.seen_from(origin).permuted(order), tile_bytes // itemsize):
                yield _TileRead(row, chunk, back, [box], -1, box.volume * itemsize)
            return
        back = tuple(np.argsort(dense).tolist())
        stored, total = [sizes[d] for d in dense], math.prod(sizes) * itemsize
        for begin in range(0, total, tile_bytes):
            end = min(begin + tile_bytes, total)
            boxes = list(range_boxes(stored, begin // itemsize, end // itemsize))
            yield _TileRead(row, chunk, back, boxes, begin, end - begin)

    def _batches(self, reads: Iterator[_TileRead], tile_bytes: int) -> Iterator[list[Tile]]:
        """Yield tiles of ``reads``, of up to ``tile_bytes`` together."""
        sums: dict[int, int] = {}
        batch: list[_TileRead] = []
        size_bytes = 0
        for read in reads:
            if batch and size_bytes + read.size_bytes > tile_bytes:
                yield self._tiles(batch, sums)
                batch, size_bytes = [], 0
            batch.append(read)
            size_bytes += read.size_bytes
        if batch:
            yield self._tiles(batch, sums)

    def _tiles(self, batch: Sequence[_TileRead], sums: dict[int, int]) -> list[Tile]:
        runs: list[_Run] = []
        wanted: list[_Wanted] = []
        buffers, tiles = [], []
        for read in batch:
            dtype = stored_dtype(self.index.dtype(read.row))
            buffers.append(np.empty(read.size_bytes // dtype.itemsize, dtype))
            if read.begin >= 0:
                runs.append((read.chunk, read.begin, read.size_bytes, buffers[-1].ctypes.data))
            else:
                array = buffers[-1].reshape(read.boxes[0].sizes).transpose(read.back)
                offsets = read.boxes[0].permuted(read.back).offsets
                wanted.append((read.chunk, offsets, (1,) * array.ndim, array))
        self._fill(wanted, runs)
        for read, buffer in zip(batch, buffers, strict=True):
            self._check_whole(read, buffer, sums)
            origin, at = self.index.box(read.chunk).offsets, 0
            for box in read.boxes:
                array = buffer[at : at + box.volume].reshape(box.sizes).transpose(read.back)
                place = box.permuted(read.back).moved(origin)
                tiles.append(Tile(read.row, place.offsets, np.ascontiguousarray(array).reshape(place.sizes)))
                at += box.volume
        return tiles

    def _check_whole(self, read: _TileRead, data: Array, sums: dict[int, int]) -> None:
        """Verify the single checksum of a payload read in several requests.

        ``sums`` has the checksums of the bytes before ``data``, by chunk.
        """
        chunk, size_bytes = read.chunk, int(self.index.payload_lengths[read.chunk])
        is_compared = self._engine.verify == "none" or len(self.index.block_crcs(chunk))
        if read.begin < 0 or read.size_bytes >= size_bytes or is_compared:
            return
        sums[chunk] = crc32(data.view(np.uint8).data, sums.get(chunk, 0))
        if read.begin + read.size_bytes < size_bytes:
            return
        got, expected = sums.pop(chunk), self.payload_crc(chunk)
        if expected not in (None, got):
            fqn, name = self.index.fqns[read.row], self.index.files[int(self.index.chunk_files[chunk])]
            raise CorruptCheckpointError(
                f"{self.name}: tensor {fqn!r} is damaged: CRC-32 of its bytes in {name} is {got:08x}, "
                f"expected {expected:08x}. Use another checkpoint.",
                path=f"{self.store.url}/{name}",
                fqn=fqn,
            )

    # -- parts of tensors ------------------------------------------------------------------------------------

    def read(
        self, tensor_row: int, slices: Slices | None = None, part: Sequence[slice] | None = None
    ) -> Array:
        """Read a tensor, or a slice with the semantics of numpy, or a ``part`` of the slice (step 1 in each
        dimension).

        Only required bytes are read; partly read blocks are verified with ``verify="full"`` only. Negative
        bounds and steps, fewer slices than dimensions and one ellipsis are allowed. Raises `PlanError` for
        invalid slices.
        """
        selection = self._selection(tensor_row, slices)
        return self._read(tensor_row, selection if part is None else selection.part(part))

    def shape_of(self, tensor_row: int, slices: Slices | None = None) -> tuple[int, ...]:
        """Return the shape of the result of `read`, without reading."""
        return self._selection(tensor_row, slices).shape

    def slabs(self, tensor_row: int, slices: Slices | None = None) -> Iterator[Array]:
        """Yield the result of `read` in parts of about `TILE_BYTES` along the first dimension."""
        selection, parts = self._selection(tensor_row, slices), self.parts(tensor_row)
        is_whole = selection == self._selection(tensor_row, None)
        if is_whole and len(parts) == 1 and self.is_c_ordered(parts[0][0]):
            for tile in self.stream([tensor_row]):  # verifies the single checksum of a foreign payload
                yield tile.array
            return
        volume, count = math.prod(map(len, selection.ranges)), (*selection.shape, 1)[0]
        most = TILE_BYTES // self.index.dtype(tensor_row).itemsize
        if not selection.shape or volume <= most:
            yield self._read(tensor_row, selection)
            return
        rows = max(1, most * count // volume)
        for begin in range(0, count, rows):
            yield self._read(tensor_row, selection.part([slice(begin, begin + rows)]))

    def _selection(self, tensor_row: int, slices: Slices | None) -> StridedSelection:
        return select(self.index.shape(tensor_row), slices, self.index.fqns[tensor_row])

    def _read(self, tensor_row: int, selection: StridedSelection) -> Array:
        parts = self.parts(tensor_row)  # before allocating memory of the shape, which may be wrong
        dtype = stored_dtype(self.index.dtype(tensor_row))
        result = np.empty([*map(len, selection.ranges)], dtype)
        steps = [abs(one.step) for one in selection.ranges]
        if result.size:
            self._engine.resolve([chunk for chunk, _ in parts])
            wanted: list[_Wanted] = []
            for chunk, box in parts:
                if (found := selection.within(box)) is not None:
                    first, place = found
                    target = result[place] if place else result  # a view also without dimensions
                    origin = self.index.box(chunk).offsets
                    offsets = [at - low for at, low in zip(first, origin, strict=True)]
                    wanted.append((chunk, offsets, steps, target))
            self._fill(wanted)
        return selection.finish(result)

    def _fill(self, wanted: Iterable[_Wanted], runs: Iterable[_Run] = ()) -> None:
        """Read all of ``wanted``, of resolved chunks, and ``runs``, at once."""
        payloads, runs, boxes, left = self._engine.payloads, [*runs], [], [*wanted]
        while left:
            chunk, offsets, steps, target = left.pop()
            order, strides = payloads.layout(chunk)
            far = [
                d
                for d, stride in zip(order, strides, strict=True)
                if (steps[d] - 1) * stride > _SKIPPED_BYTES
            ]
            apart = next((d for d in far if 1 < target.shape[d] <= _MAX_SKIPS), None)
            if apart is not None:
                for row in range(target.shape[apart]):
                    begins = [*offsets[:apart], offsets[apart] + row * steps[apart], *offsets[apart + 1 :]]
                    part = target[(*(slice(None),) * apart, slice(row, row + 1))]
                    left.append((chunk, begins, steps, part))
                continue
            is_dense = max(steps, default=1) == 1 and target.flags.c_contiguous
            if is_dense and not payloads.is_permuted(chunk):
                box = Box(tuple(offsets), target.shape)
                if (position := contiguous_position(self.index.box(chunk).sizes, box)) is not None:
                    at = position * target.itemsize
                    runs.append((chunk, at, target.nbytes, target.ctypes.data))
                    continue
            begin = sum(offsets[d] * stride for d, stride in zip(order, strides, strict=True))
            between = tuple(stride * steps[d] for d, stride in zip(order, strides, strict=True))
            elements = Elements(chunk, begin, tuple(target.shape[d] for d in order), between)
            put = put_at(target.ctypes.data, target.itemsize, [target.strides[d] for d in order])
            boxes.append(BoxRequest(elements, put))
        with self._running:
            self._engine.run(ByteRuns(*np.array(runs, np.int64).reshape(-1, 4).T), boxes)
