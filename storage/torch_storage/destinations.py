"""Read destinations: a rank's tensors as runs and boxes for the read engine.

Contiguous rows are found for all rows together, because there may be many thousands. Other rows become
elements and a view of the local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcp.storage.engine.memory import ScratchBuffers, repeats_places
from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import BoxRequest, ByteRuns, Elements, Pieces, PutBox, put_at
from dcp.storage.errors import PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.geometry.strides import contiguous_positions, is_c_ordered, row_matrix
from dcp.storage.tensors import (
    LocalMemory,
    as_copied,
    finish_device_work,
    is_addressable,
    narrow,
    torch_dtype,
)

_PINNED = ScratchBuffers(
    2 * BLOCK_BYTES,
    lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy().data,
)
"""Pinned scratch memory of reads to an accelerator."""


Filled = tuple[Elements, torch.Tensor]
"""Stored elements and the view of a local tensor that they fill, axis by axis."""


def classify(engine: ReadEngine, pieces: Pieces, memory: LocalMemory) -> tuple[ByteRuns, Iterator[Filled]]:
    """Split ``pieces`` into runs, contiguous in payload and plain memory of equal dtype, and filled views."""
    index, box_start = engine.index, pieces.box_start
    chunks, dests, ndims = pieces.chunks, pieces.dests, np.diff(box_start)
    engine.resolve(chunks)
    tensors = index.chunk_tensors[chunks]
    usable = memory.is_plain[dests] & (memory.dtype_codes[dests] == index.dtype_codes[tensors])
    usable &= ndims == np.diff(memory.shape_start)[dests]
    usable &= ndims == index.ndims[tensors]
    usable &= ~np.isin(chunks, engine.payloads.permuted_chunks)
    is_run = np.zeros(len(chunks), np.bool_)
    positions, places, volumes = np.zeros((3, len(chunks)), np.int64)
    for ndim in np.flatnonzero(np.bincount(ndims[usable])).tolist():  # faster than np.unique
        rows = np.flatnonzero(usable & (ndims == ndim))
        lengths = row_matrix(pieces.lengths, box_start, rows, ndim)
        stored = contiguous_positions(
            row_matrix(index.chunk_sizes, index.box_start, chunks[rows], ndim),
            row_matrix(pieces.storage_offsets, box_start, rows, ndim),
            lengths,
        )
        local = contiguous_positions(
            row_matrix(memory.shape_values, memory.shape_start, dests[rows], ndim),
            row_matrix(pieces.dest_offsets, box_start, rows, ndim),
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
    others = np.flatnonzero(~is_run).tolist()
    return runs, map(partial(_filled, engine, pieces, memory), others)


def read_into(
    engine: ReadEngine, runs: ByteRuns, several: Iterable[Filled], tensors: Sequence[torch.Tensor]
) -> None:
    """Read ``runs``, and ``several`` into views of the local ``tensors``.

    Raises:
        PlanError: For a view whose elements share memory.
    """
    index, boxes = engine.index, list[BoxRequest]()
    more: list[tuple[int, int, int, int]] = []
    is_converted = is_on_device = False
    for elements, target in several:
        if not target.numel():
            continue
        tensor = int(index.chunk_tensors[elements.chunk])
        refuse_shared(index.fqns[tensor], target)
        saved = torch_dtype(int(index.dtype_codes[tensor]))
        if target.dtype != saved or not is_addressable(target):
            boxes.append(BoxRequest(elements, _put_converted(engine, index.fqns[tensor], target, saved)))
            is_converted, is_on_device = True, is_on_device or not target.is_cpu
            continue
        itemsize = target.element_size()
        if is_c_ordered(elements.lengths, [step // itemsize for step in elements.strides]) and is_c_ordered(
            elements.lengths, target.stride()
        ):
            more.append((elements.chunk, elements.begin, target.nbytes, target.data_ptr()))
        else:
            steps = [step * itemsize for step in target.stride()]
            boxes.append(BoxRequest(elements, put_at(target.data_ptr(), itemsize, steps)))
    if more:
        runs = ByteRuns.joined([runs, ByteRuns(*np.array(more, np.int64).T)])
    if is_converted:
        finish_device_work(tensors)
    if is_on_device and torch.accelerator.is_available():
        engine.scratch = _PINNED
    try:
        engine.run(runs, boxes)
    finally:
        # The engine writes to memory directly; the version lets autograd notice changes before a backward.
        torch.autograd.graph.increment_version(tensors)


# -- row by row ----------------------------------------------------------------------------------------------


def _filled(engine: ReadEngine, pieces: Pieces, memory: LocalMemory, row: int) -> Filled:
    """Return a row's elements and the view of the tensor."""
    box = slice(int(pieces.box_start[row]), int(pieces.box_start[row + 1]))
    at, local, lengths = (
        tuple(values[box].tolist())
        for values in (pieces.storage_offsets, pieces.dest_offsets, pieces.lengths)
    )
    dest = memory.tensors[int(pieces.dests[row])]
    target = dest if dest.shape == lengths else narrow(dest, local, lengths)
    elements, order = engine.elements(int(pieces.chunks[row]), at, lengths)
    return elements, target.permute(order)


def refuse_shared(fqn: str, target: torch.Tensor) -> None:
    """Raise PlanError for a destination whose elements share memory."""
    if not target.is_contiguous() and repeats_places(target.shape, target.stride()):
        raise PlanError(
            f"{fqn!r} cannot be loaded into a tensor whose elements share memory (expand() or as_strided()); "
            "load into a clone()",
            fqn=fqn,
        )


def _put_converted(engine: ReadEngine, name: str, target: torch.Tensor, saved: torch.dtype) -> PutBox:
    """Return a callback that copies elements to ``target`` with conversion of dtype or device.

    Losses other than precision are recorded for the report.
    """
    if target.dtype == saved:  # copy without conversion, as bytes if an element has one byte
        target = as_copied(target.detach())
        saved = target.dtype

    # Also for leaves that require grad and for inference tensors; grad modes are local to a thread.
    @torch.inference_mode()
    def put(at: tuple[int, ...], elements: npt.NDArray[Any]) -> None:
        aligned = elements if elements.flags.aligned else elements.copy()
        stored = torch.from_numpy(aligned).view(saved)
        narrow(target, at, elements.shape).copy_(stored)
        loss = _loss(stored, target.dtype) if stored.dtype != target.dtype and stored.numel() else None
        if loss is not None:
            kinds = f"{stored.dtype} to {target.dtype}".replace("torch.", "")
            engine.stats.lossy[name] = f"{kinds}: {loss}"

    return put


def _loss(stored: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return the kind of loss of a conversion; None for none."""
    if stored.dtype.is_complex:
        if dtype.is_complex:
            return _loss(torch.view_as_real(stored), dtype.to_real())
        return "imaginary parts were dropped" if bool(stored.imag.any()) else _loss(stored.real, dtype)
    if stored.dtype.is_floating_point and stored.element_size() == 1:
        stored = stored.float()  # torch cannot compare float8
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
    # float8_e4m3fn has no infinity, and torch clamps to the largest value: more than a rounding error.
    cut = (stored.abs() - most > most * torch.finfo(dtype).eps / 2) & found.isfinite()
    return f"values beyond its range became {most:g}" if bool(cut.any()) else None
