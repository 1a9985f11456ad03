"""Where what is read goes: a rank's tensors as runs, regions and boxes for the read engine.

Rows that are one run, in the file and in the memory of the destination, are found for all together, since
there may be many thousands. What is left is looked at row by row.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp.storage.engine.memory import item_view
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import BoxRequest, ByteRuns, ReadColumns, Region
from dcp.storage.engine.reading.units import Unit
from dcp.storage.engine.reading.worker import ReadWorker
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import Int64
from dcp.storage.geometry.boxes import Box, contiguous_position, split_box
from dcp.storage.geometry.ragged import row_matrix
from dcp.storage.geometry.strides import contiguous_positions
from dcp.storage.tensors import LocalMemory, as_copied, is_addressable, narrow, torch_dtype
from dcp.storage.torch_compat import has_internal_overlap

__all__ = ["classify"]

_STAGED_BYTES = 4 << 20


class _BoxRead(NamedTuple):
    chunk: int
    dest: torch.Tensor
    storage_offsets: tuple[int, ...]
    dest_offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def _rows(columns: ReadColumns, memory: LocalMemory, numbers: Int64) -> Iterator[_BoxRead]:
    """The rows ``numbers``, one by one."""
    tensors = memory.tensors
    boxes = [item_view(values) for values in (columns.storage_offsets, columns.dest_offsets, columns.lengths)]
    of_rows = (columns.chunks, columns.dests, columns.box_start[:-1], columns.box_start[1:])
    for chunk, dest, begin, end in zip(*(values[numbers].tolist() for values in of_rows), strict=True):
        offsets, dest_offsets, lengths = (tuple(values[begin:end]) for values in boxes)
        yield _BoxRead(chunk, tensors[dest], offsets, dest_offsets, lengths)


def classify(
    engine: ReadEngine, columns: ReadColumns, memory: LocalMemory
) -> tuple[ByteRuns, list[Region], list[Unit], list[BoxRequest]]:
    """Contiguous runs, strided regions, and staged reads (other dtype, other device): units, or boxes where
    the engine joins what it reads."""
    runs, others = _plain_runs(engine, columns, memory)
    regions: list[Region] = []
    units: list[Unit] = []
    staged: list[BoxRequest] = []
    more: list[tuple[int, int, int, int]] = []
    for row in _rows(columns, memory, others):
        chunk, _, offsets, _, lengths = row
        target = _target(engine, row)
        if target.dtype != torch_dtype(_dtype_code(engine, chunk)) or not is_addressable(target):
            if engine.joins:
                staged.append(_staged_box(engine, chunk, offsets, lengths, target))
            else:
                units.append(_staged(engine, chunk, offsets, lengths, target))
            continue
        itemsize = target.element_size()
        if target.is_contiguous() and not engine.payloads.is_permuted(chunk):
            position = contiguous_position(engine.index.box(chunk).sizes, Box(offsets, lengths))
            if position is not None:
                more.append((chunk, position * itemsize, target.nbytes, target.data_ptr()))
                continue
        strides = tuple(stride * itemsize for stride in target.stride())
        regions.append(Region(chunk, offsets, lengths, target.data_ptr(), strides))
    return _joined(runs, more), regions, units, staged


def _joined(runs: ByteRuns, more: Sequence[tuple[int, int, int, int]]) -> ByteRuns:
    if not more:
        return runs
    columns = np.array(more, np.int64).T
    whole = zip((getattr(runs, field.name) for field in fields(ByteRuns)), columns, strict=True)
    return ByteRuns(*(np.concatenate(parts) for parts in whole))


# -- all rows at once ----------------------------------------------------------------------------------------


def _plain_runs(engine: ReadEngine, columns: ReadColumns, memory: LocalMemory) -> tuple[ByteRuns, Int64]:
    """(rows that are one run in the payload and one in plain memory of the stored dtype, numbers of the
    others)."""
    index, box_start = engine.index, columns.box_start
    chunks, dests, ndims = columns.chunks, columns.dests, np.diff(box_start)
    tensors = index.chunk_tensors[chunks]
    usable = memory.is_plain[dests] & (memory.dtype_codes[dests] == index.dtype_codes[tensors])
    usable &= ndims == np.diff(memory.shape_start)[dests]
    usable &= ndims == index.ndims[tensors]
    permuted = engine.payloads.permuted_chunks
    if len(permuted):
        usable &= ~np.isin(chunks, permuted)
    is_run = np.zeros(len(chunks), np.bool_)
    positions, places, volumes = (np.zeros(len(chunks), np.int64) for _ in range(3))
    for ndim in np.unique(ndims[usable]).tolist():
        rows = np.flatnonzero(usable & (ndims == ndim))
        lengths = row_matrix(columns.lengths, box_start, rows, ndim)
        stored = contiguous_positions(
            row_matrix(index.chunk_sizes, index.box_start, chunks[rows], ndim),
            row_matrix(columns.storage_offsets, box_start, rows, ndim),
            lengths,
        )
        local = contiguous_positions(
            row_matrix(memory.shape_values, memory.shape_start, dests[rows], ndim),
            row_matrix(columns.dest_offsets, box_start, rows, ndim),
            lengths,
        )
        is_run[rows] = stored.is_run & local.is_run
        positions[rows], places[rows] = stored.first, local.first
        volumes[rows] = lengths.prod(axis=1)
    found = np.flatnonzero(is_run)
    itemsizes = index.itemsizes[tensors[found]]
    runs = ByteRuns(
        chunks=chunks[found],
        payload_positions=positions[found] * itemsizes,
        sizes_bytes=volumes[found] * itemsizes,
        addresses=memory.pointers[dests[found]] + places[found] * itemsizes,
    )
    return runs, np.flatnonzero(~is_run)


# -- row by row ----------------------------------------------------------------------------------------------


def _dtype_code(engine: ReadEngine, chunk: int) -> int:
    return int(engine.index.dtype_codes[int(engine.index.chunk_tensors[chunk])])


def _target(engine: ReadEngine, row: _BoxRead) -> torch.Tensor:
    """The part of the row's tensor that is read into."""
    target = row.dest if row.dest.shape == row.lengths else narrow(row.dest, row.dest_offsets, row.lengths)
    if not target.is_contiguous() and has_internal_overlap(target):
        fqn = engine.index.fqns[int(engine.index.chunk_tensors[row.chunk])]
        raise PlanError(
            f"{fqn!r} cannot be loaded into an expanded tensor, whose elements share memory; load into a "
            "clone() of it",
            fqn=fqn,
        )
    return target


_local = threading.local()


def _staging_buffer(*, for_device: bool) -> torch.Tensor:
    """This thread's buffer for reads that end elsewhere than in CPU memory of the stored dtype."""
    pinned = for_device and torch.accelerator.is_available()
    name = "pinned" if pinned else "pageable"
    buffer: torch.Tensor | None = getattr(_local, name, None)
    if buffer is None:
        buffer = torch.empty(_STAGED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        setattr(_local, name, buffer)
    return buffer


def _staged_box(
    engine: ReadEngine, chunk: int, offsets: Sequence[int], lengths: Sequence[int], target: torch.Tensor
) -> BoxRequest:
    """As `_staged`, out of the engine's scratch memory."""
    target, saved = _as_stored(engine, chunk, target)

    @torch.inference_mode()
    def put(at: tuple[int, ...], elements: npt.NDArray[Any]) -> None:
        aligned = elements if elements.flags.aligned else elements.copy()
        narrow(target, at, elements.shape).copy_(torch.from_numpy(aligned).view(saved))

    return BoxRequest(chunk, tuple(offsets), tuple(lengths), put)


def _as_stored(engine: ReadEngine, chunk: int, target: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """``target`` and the stored dtype, both as bytes where nothing is converted and an element is one."""
    saved = torch_dtype(_dtype_code(engine, chunk))
    if target.dtype != saved:
        return target, saved
    target = as_copied(target.detach())
    return target, target.dtype


def _staged(
    engine: ReadEngine, chunk: int, offsets: Sequence[int], lengths: Sequence[int], target: torch.Tensor
) -> Unit:
    """Read through a staging buffer and let torch convert: another device or another dtype."""
    engine.stats.bytes_needed += math.prod(lengths) * engine.itemsize(chunk)
    sizes = engine.index.box(chunk)[1]
    target, saved = _as_stored(engine, chunk, target)
    # Slabs as they lie in the file, so that no byte is read for several of them.
    order, _ = engine.payloads.layout(chunk)
    back = [order.index(dim) for dim in range(len(order))]
    target = target.permute(order)
    stored_offsets, stored_lengths = [offsets[d] for d in order], [lengths[d] for d in order]

    # For leaves that require grad and inference tensors, too; the caller's modes do not reach this thread.
    @torch.inference_mode()
    def unit(worker: ReadWorker) -> None:
        itemsize = engine.itemsize(chunk)
        for slab in split_box(Box.whole(stored_lengths), _STAGED_BYTES // itemsize):
            slab_offsets, slab_sizes = slab
            slab_bytes = slab.volume * itemsize
            staged = _staging_buffer(for_device=not target.is_cpu)[:slab_bytes].view(saved).view(slab_sizes)
            begin = tuple(o + s for o, s in zip(stored_offsets, slab_offsets, strict=True))
            is_permuted = engine.payloads.is_permuted(chunk)
            position = None if is_permuted else contiguous_position(sizes, Box(begin, slab_sizes))
            if position is not None:
                worker.read_direct(chunk, position * itemsize, slab_bytes, staged.data_ptr())
            else:
                strides = tuple(staged.stride(d) * itemsize for d in back)
                box = tuple(begin[d] for d in back), tuple(slab_sizes[d] for d in back)
                worker.read_region(Region(chunk, *box, staged.data_ptr(), strides))
            narrow(target, slab_offsets, slab_sizes).copy_(staged)

    return unit
