"""Where what is read goes: a rank's tensors as runs, regions and boxes for the read engine.

Rows that are one run, in the file and in the memory of the destination, are found for all together, since
there may be many thousands. What is left is looked at row by row, as elements and the view that they fill.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp.storage.engine.memory import item_view, repeats_places
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import (
    BoxRequest,
    ByteRuns,
    Elements,
    ReadColumns,
    Region,
    StridedRegion,
)
from dcp.storage.engine.reading.units import Unit
from dcp.storage.engine.reading.worker import ReadWorker
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import Int64
from dcp.storage.geometry.boxes import Box, split_box
from dcp.storage.geometry.ragged import row_matrix
from dcp.storage.geometry.strides import c_strides, contiguous_positions, is_c_ordered
from dcp.storage.tensors import LocalMemory, as_copied, is_addressable, narrow, torch_dtype

__all__ = ["Filled", "Reads", "classify", "reads_into", "refuse_shared"]

_STAGED_BYTES = 4 << 20


class Filled(NamedTuple):
    """Stored elements, and the view of a local tensor that they fill; axis by axis."""

    elements: Elements
    view: torch.Tensor


class Reads(NamedTuple):
    """Contiguous runs, strided regions, and staged reads (other dtype, other device): units, or boxes where
    the engine joins what it reads."""

    runs: ByteRuns
    regions: Sequence[StridedRegion]
    units: Sequence[Unit]
    boxes: Sequence[BoxRequest]


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


def classify(engine: ReadEngine, columns: ReadColumns, memory: LocalMemory) -> Reads:
    """What is to be read for ``columns``, which are boxes of the engine's chunks."""
    runs, others = _plain_runs(engine, columns, memory)
    reads = reads_into(engine, (_filled(engine, row) for row in _rows(columns, memory, others)))
    return reads._replace(runs=ByteRuns.joined([runs, reads.runs]) if len(reads.runs.chunks) else runs)


def reads_into(engine: ReadEngine, several: Iterable[Filled]) -> Reads:
    """What is to be read for these. PlanError for a view whose elements share memory."""
    regions: list[StridedRegion] = []
    units: list[Unit] = []
    staged: list[BoxRequest] = []
    runs: list[tuple[int, int, int, int]] = []
    for filled in several:
        elements, target = filled
        if not target.numel():
            continue
        refuse_shared(engine.index.fqns[int(engine.index.chunk_tensors[elements.chunk])], target)
        if target.dtype != torch_dtype(_dtype_code(engine, elements.chunk)) or not is_addressable(target):
            if engine.joins:
                staged.append(_staged_box(engine, filled))
            else:
                units.append(_staged(engine, filled))
            continue
        itemsize = target.element_size()
        strides = tuple(stride * itemsize for stride in target.stride())
        region = StridedRegion(elements, target.data_ptr(), strides)
        if _is_run(region, itemsize):
            runs.append((elements.chunk, elements.begin, target.nbytes, region.address))
        else:
            regions.append(region)
    columns = np.array(runs, np.int64).reshape(-1, 4).T
    return Reads(ByteRuns(*columns), regions, units, staged)


def _is_run(region: StridedRegion, itemsize: int) -> bool:
    """Whether it is one run in the payload and one in memory."""
    lengths = region.elements.lengths
    own, strides = (
        [step // itemsize for step in steps] for steps in (region.elements.strides, region.strides)
    )
    return is_c_ordered(lengths, own) and is_c_ordered(lengths, strides)


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


def _filled(engine: ReadEngine, row: _BoxRead) -> Filled:
    """The row's elements, and the part of its tensor that is read into."""
    target = row.dest if row.dest.shape == row.lengths else narrow(row.dest, row.dest_offsets, row.lengths)
    region = engine.strided(Region(row.chunk, row.storage_offsets, row.lengths, 0, (0,) * len(row.lengths)))
    order, _ = engine.payloads.layout(row.chunk)
    return Filled(region.elements, target.permute(order))


def refuse_shared(fqn: str, target: torch.Tensor) -> None:
    """PlanError for a tensor to load into whose elements share memory."""
    if not target.is_contiguous() and repeats_places(target.shape, target.stride()):
        raise PlanError(
            f"{fqn!r} cannot be loaded into an expanded tensor, or a view by as_strided(), whose elements "
            "share memory; load into a clone() of it",
            fqn=fqn,
        )


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


def _staged_box(engine: ReadEngine, filled: Filled) -> BoxRequest:
    """As `_staged`, out of the engine's scratch memory."""
    target, saved = _as_stored(engine, filled.elements.chunk, filled.view)

    @torch.inference_mode()
    def put(at: tuple[int, ...], elements: npt.NDArray[Any]) -> None:
        aligned = elements if elements.flags.aligned else elements.copy()
        stored = torch.from_numpy(aligned).view(saved)
        narrow(target, at, elements.shape).copy_(stored)
        _note_loss(engine, filled.elements.chunk, stored, target.dtype)

    return BoxRequest(filled.elements, put)


def _as_stored(engine: ReadEngine, chunk: int, target: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """``target`` and the stored dtype, both as bytes where nothing is converted and an element is one."""
    saved = torch_dtype(_dtype_code(engine, chunk))
    if target.dtype != saved:
        return target, saved
    target = as_copied(target.detach())
    return target, target.dtype


def _staged(engine: ReadEngine, filled: Filled) -> Unit:
    """Read through a staging buffer and let torch convert: another device or another dtype."""
    chunk, begin, lengths, strides = filled.elements
    engine.stats.bytes_needed += math.prod(lengths) * engine.itemsize(chunk)
    target, saved = _as_stored(engine, chunk, filled.view)

    # For leaves that require grad and inference tensors, too; the caller's modes do not reach this thread.
    @torch.inference_mode()
    def unit(worker: ReadWorker) -> None:
        itemsize = engine.itemsize(chunk)
        # Slabs as they lie in the file, so that no byte is read for several of them.
        for slab in split_box(Box.whole(lengths), _STAGED_BYTES // itemsize):
            offsets, sizes = slab
            slab_bytes = slab.volume * itemsize
            staged = _staging_buffer(for_device=not target.is_cpu)[:slab_bytes].view(saved).view(sizes)
            first = begin + sum(i * s for i, s in zip(offsets, strides, strict=True))
            part = Elements(chunk, first, sizes, strides)
            if part.is_run(itemsize):
                worker.read_direct(chunk, first, slab_bytes, staged.data_ptr())
            else:
                worker.read_region(StridedRegion(part, staged.data_ptr(), c_strides(sizes, itemsize)))
            narrow(target, offsets, sizes).copy_(staged)
            _note_loss(engine, chunk, staged, target.dtype)

    return unit


def _note_loss(engine: ReadEngine, chunk: int, stored: torch.Tensor, dtype: torch.dtype) -> None:
    """Note for the report where values of ``stored`` are lost in ``dtype``: more than digits."""
    if stored.dtype == dtype or not stored.numel():
        return
    loss = _loss(stored, dtype)
    if loss is not None:
        fqn = engine.index.fqns[int(engine.index.chunk_tensors[chunk])]
        engine.stats.lossy[fqn] = f"{stored.dtype} to {dtype}: {loss}".replace("torch.", "")


def _loss(stored: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What of the values is lost, if anything is."""
    if stored.dtype.is_complex:
        if dtype.is_complex:
            return _loss(torch.view_as_real(stored), dtype.to_real())
        return "imaginary parts were dropped" if bool(stored.imag.any()) else _loss(stored.real, dtype)
    if stored.dtype.is_floating_point and stored.element_size() == 1:
        stored = stored.float()  # torch compares no others of that size
    if not dtype.is_floating_point:
        if dtype.is_complex or bool((stored.to(dtype).to(stored.dtype) == stored).all()):
            return None
        return "values were cut off"
    most = torch.finfo(dtype).max
    if not stored.dtype.is_floating_point:
        if stored.dtype == torch.bool or torch.iinfo(stored.dtype).max <= most:
            return None
        stored = stored.double()
    elif torch.finfo(stored.dtype).max <= most:
        return None
    low, high = stored.aminmax()
    if -most <= low and high <= most:
        return None
    found = stored.to(dtype).to(stored.dtype)
    if bool((found.isfinite() < stored.isfinite()).any()):
        return "values beyond its range became inf or nan"
    # float8_e4m3fn has no infinity: torch takes its largest value instead, here by more than is rounded.
    cut = (stored.abs() - most > most * torch.finfo(dtype).eps / 2) & found.isfinite()
    return f"values beyond its range became {most:g}" if bool(cut.any()) else None
