"""Where what is read goes: a request's tensors as runs, regions and boxes for the read engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcp.storage.engine.memory import item_view
from dcp.storage.engine.read import ReadEngine, Unit
from dcp.storage.engine.read_requests import Box, Region, Runs
from dcp.storage.engine.read_worker import Worker
from dcp.storage.errors import PlanError
from dcp.storage.tensors import as_copied, is_addressable, narrow, slab_boxes, torch_dtype

__all__ = ["ReadRequest", "classify"]

_STAGED_BYTES = 4 << 20


@dataclass(frozen=True)
class ReadRequest:
    """What a rank wants, row by row: the box at ``storage_offsets[i]`` of extent ``lengths[i]`` of chunk
    ``chunks[i]`` (a row of the index) goes to ``dest_offsets[i]`` of the local tensor ``dests[i]``."""

    chunks: Sequence[int] = ()
    dests: Sequence[torch.Tensor] = ()
    storage_offsets: Sequence[tuple[int, ...]] = ()
    dest_offsets: Sequence[tuple[int, ...]] = ()
    lengths: Sequence[tuple[int, ...]] = ()


def classify(engine: ReadEngine, request: ReadRequest) -> tuple[Runs, list[Region], list[Unit], list[Box]]:
    """Contiguous runs, strided regions, and staged reads (other dtype, other device) of a request: units, or
    boxes where the engine joins what it reads."""
    index = engine.index
    dtypes = {code: torch_dtype(code) for code in np.unique(index.dtype_codes).tolist()}
    codes = item_view(index.dtype_codes)
    chunks: list[int] = []
    positions: list[int] = []
    sizes_bytes: list[int] = []
    addresses: list[int] = []
    regions: list[Region] = []
    units: list[Unit] = []
    staged: list[Box] = []
    tensor_of, boxes = item_view(index.chunk_tensors), item_view(index.box_start)
    flat_sizes = item_view(index.chunk_sizes)
    columns = (request.chunks, request.dests, request.storage_offsets, request.dest_offsets, request.lengths)
    for chunk, dest, offsets, dest_offsets, lengths in zip(*columns, strict=True):
        target = dest if dest.shape == lengths else narrow(dest, dest_offsets, lengths)
        contiguous = target.is_contiguous()
        if not contiguous and torch._debug_has_internal_overlap(target) == 1:
            fqn = index.fqns[tensor_of[chunk]]
            raise PlanError(
                f"{fqn!r} cannot be loaded into an expanded tensor, whose elements share memory; load into a "
                "clone() of it",
                fqn=fqn,
            )
        if target.dtype != dtypes[codes[tensor_of[chunk]]] or not is_addressable(target):
            if engine.joins:
                staged.append(_staged_box(engine, chunk, offsets, lengths, target))
            else:
                units.append(_staged(engine, chunk, offsets, lengths, target))
            continue
        itemsize = target.element_size()
        if contiguous and not engine.payloads.is_permuted(chunk):
            sizes = flat_sizes[boxes[chunk] : boxes[chunk + 1]].tolist()
            position = _contiguous_position(sizes, offsets, lengths)
            if position is not None:
                chunks.append(chunk)
                positions.append(position * itemsize)
                sizes_bytes.append(target.nbytes)
                addresses.append(target.data_ptr())
                continue
        strides = tuple(stride * itemsize for stride in target.stride())
        regions.append(Region(chunk, tuple(offsets), tuple(lengths), target.data_ptr(), strides))
    runs = Runs(*(np.array(column, dtype=np.int64) for column in (chunks, positions, sizes_bytes, addresses)))
    return runs, regions, units, staged


def _contiguous_position(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
    """The first element's place if the box is one run of a C-ordered chunk of ``sizes``, else None."""
    position, step, open_dims = 0, 1, True
    for size, offset, length in zip(reversed(sizes), reversed(offsets), reversed(lengths), strict=True):
        if not open_dims and length != 1:
            return None
        if length != size:
            open_dims = False
        position += offset * step
        step *= size
    return position


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
) -> Box:
    """As `_staged`, out of the engine's scratch memory."""
    target, saved = _as_stored(engine, chunk, target)

    @torch.inference_mode()
    def put(at: tuple[int, ...], elements: npt.NDArray[Any]) -> None:
        aligned = elements if elements.flags.aligned else elements.copy()
        narrow(target, at, elements.shape).copy_(torch.from_numpy(aligned).view(saved))

    return Box(chunk, tuple(offsets), tuple(lengths), put)


def _as_stored(engine: ReadEngine, chunk: int, target: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """``target`` and the stored dtype, both as bytes where nothing is converted and an element is one."""
    saved = torch_dtype(int(engine.index.dtype_codes[int(engine.index.chunk_tensors[chunk])]))
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
    def unit(worker: Worker) -> None:
        itemsize = engine.itemsize(chunk)
        for slab_offsets, slab_sizes in slab_boxes(stored_lengths, itemsize, _STAGED_BYTES):
            slab_bytes = math.prod(slab_sizes) * itemsize
            staged = _staging_buffer(for_device=not target.is_cpu)[:slab_bytes].view(saved).view(slab_sizes)
            begin = tuple(o + s for o, s in zip(stored_offsets, slab_offsets, strict=True))
            is_permuted = engine.payloads.is_permuted(chunk)
            position = None if is_permuted else _contiguous_position(sizes, begin, slab_sizes)
            if position is not None:
                worker.read_direct(chunk, position * itemsize, slab_bytes, staged.data_ptr())
            else:
                strides = tuple(staged.stride(d) * itemsize for d in back)
                box = tuple(begin[d] for d in back), tuple(slab_sizes[d] for d in back)
                worker.read_region(Region(chunk, *box, staged.data_ptr(), strides))
            narrow(target, slab_offsets, slab_sizes).copy_(staged)

    return unit
