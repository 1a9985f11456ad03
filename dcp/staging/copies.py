"""Copies of tensors to an arena: layout of the copies, and transfers by threads and device streams."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from dcp.staging.arena import PAGES_BYTES, HostArena
from dcp.staging.guard import Guard, sampled
from dcp.storage.geometry.strides import Int64
from dcp.storage.tensors import LocalMemory, as_copied
from dcp.storage.torch_compat import copy_tensors

_ALIGNMENT_BYTES = 64
_MEMMOVE_FROM_BYTES = 128 << 10
"""Size from which one memmove is faster than torch's loop, and does not wake torch's threads."""
_TASK_BYTES = 8 << 20
"""Bytes of one task: enough to be worth waking a thread, and small enough to balance threads."""
_MAX_THREADS = 8
"""Some cores saturate the memory; more only take them from the training."""

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None

_numbers = itertools.count(1)


# -- places in an arena --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layout:
    """Contiguous views of an arena by source, of the sources' shapes and dtypes; tied sources share a view.

    ``number`` is unique in this process. ``copied`` are the sources to copy: neither empty nor tied to an
    earlier one. ``offsets`` and ``sizes_bytes`` are by source. ``structure`` is equal for sources that fit
    the same places.
    """

    number: int
    generation: int
    structure: tuple[Any, ...]
    offsets: Int64
    sizes_bytes: Int64
    memory: LocalMemory
    copied: Int64


def lay_out(arena: HostArena, sources: LocalMemory) -> Layout:
    """Return views of ``arena`` for ``sources``, reusing the latest layout if it fits."""
    first = _first_of_ties(sources)
    unnamed = np.flatnonzero(sources.dtype_codes == 0).tolist()
    dtypes = [sources.tensors[row].dtype for row in unnamed]
    structure = first, sources.dtype_codes, sources.shape_start, sources.shape_values, dtypes
    known: Layout | None = arena.layout
    if (
        known is None
        or known.generation != arena.generation
        or not all(itertools.starmap(np.array_equal, zip(structure, known.structure, strict=True)))
    ):
        known = arena.layout = None  # old views would keep the old mapping
        known = arena.layout = _layout(structure, first, sources.tensors, arena)
    return known


def _layout(
    structure: tuple[Any, ...], first: Int64, sources: Sequence[torch.Tensor], arena: HostArena
) -> Layout:
    sizes = np.fromiter((source.nbytes for source in sources), np.int64, len(sources))
    own = first == np.arange(len(sources))
    padded = np.where(own, -(-sizes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, 0)
    offsets = (np.cumsum(padded) - padded)[first]
    arena.reserve(int(padded.sum()))
    memory, starts, same = cast(bytearray, arena.memory), offsets.tolist(), first.tolist()
    views: list[torch.Tensor] = []
    with torch.inference_mode(False):  # inference tensors could not be written later
        for number, source in enumerate(sources):
            # separate storages, so that pickling a view stores its bytes only
            if same[number] != number:
                views.append(views[same[number]])
            elif source.numel() == 0:
                views.append(torch.empty(source.shape, dtype=source.dtype, device="cpu"))
            else:
                options = {"count": source.numel(), "offset": starts[number]}
                views.append(torch.frombuffer(memory, dtype=source.dtype, **options).view(source.shape))
    copied = np.flatnonzero(own & (sizes > 0))
    memory_of = LocalMemory.of(views)
    return Layout(next(_numbers), arena.generation, structure, offsets, sizes, memory_of, copied)


def _first_of_ties(sources: LocalMemory) -> Int64:
    """Return for each source the first source with equal address, dtype, shape and strides."""
    pointers, tensors = sources.pointers.copy(), sources.tensors
    for row in np.flatnonzero(~sources.is_plain).tolist():
        pointers[row] = tensors[row].data_ptr()
    first = np.arange(len(tensors))
    order = np.argsort(pointers, kind="stable")
    repeats = pointers[order][1:] == pointers[order][:-1]
    shared = np.zeros(len(tensors), np.bool_)
    shared[order[1:]] = repeats
    shared[order[:-1]] |= repeats
    seen: dict[tuple[object, ...], int] = {}
    for number in np.flatnonzero(shared & (pointers != 0)).tolist():
        source = tensors[number]
        reading = (source.dtype, source.shape, source.stride(), source.is_conj(), source.is_neg())
        first[number] = seen.setdefault((int(pointers[number]), source.device, *reading), number)
    return first


# -- moving the bytes ----------------------------------------------------------------------------------------


class Copier:
    """Threads and device streams of one stager, and the guard of its copies.

    ``threads`` defaults to this process's share of the available cores, at most eight.
    """

    def __init__(self, guard: Guard, threads: int | None) -> None:
        self.guard = guard
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        neighbours = max(1, int(ranks)) if ranks.isdecimal() else 1
        cores = len(os.sched_getaffinity(0)) // neighbours
        self.threads = max(1, min(_MAX_THREADS, cores)) if threads is None else threads
        self.streams: dict[torch.device, torch.Stream] = {}
        self._helpers = ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix="dcp-copy")
        self.serial = 0

    def close(self) -> None:
        """End the threads; idempotent."""
        self._helpers.shutdown()
        self.streams.clear()

    def run(self, tasks: Sequence[Callable[[], object]], most: int = _MAX_THREADS) -> None:
        """Run tasks in up to ``most`` threads; stop at the first failure. All tasks have ended on return."""
        left = iter(list(tasks))

        def work() -> None:
            try:
                for task in left:
                    task()
            finally:
                deque(left, maxlen=0)

        others = [self._helpers.submit(work) for _ in range(min(self.threads, len(tasks), most) - 1)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()


class Copying:
    """Copy of ``sources`` to ``arena``. The constructor samples the sources and reserves memory; `run` may
    run in another thread.

    References to the sources are kept until the object is dropped.
    """

    def __init__(self, copier: Copier, arena: HostArena, sources: LocalMemory) -> None:
        self._copier, self._arena, self._sources = copier, arena, sources
        copier.serial += 1
        self.layout = layout = lay_out(arena, sources)
        self._differing = sampled(sources, copier.guard, copier.serial)
        near = sources.is_plain.copy()
        for row in np.flatnonzero(~near).tolist():
            near[row] = sources.tensors[row].is_cpu
        self._here = layout.copied[near[layout.copied]]
        self._elsewhere = layout.copied[~near[layout.copied]].tolist()
        # events by device for work queued before this copy
        self._ready: dict[torch.device, torch.Event] = {}
        for device in {sources.tensors[row].device for row in self._elsewhere}:
            self._ready[device] = torch.Event(device=device)
            self._ready[device].record(torch.accelerator.current_stream(device))

    def run(self) -> list[int]:
        """Copy; return the numbers of sources whose copies differ from the samples."""
        copier, arena = self._copier, self._arena
        if arena.is_new:  # otherwise the copy would allocate each page by a fault
            step = max(_TASK_BYTES, arena.size_bytes // copier.threads // 8) // PAGES_BYTES * PAGES_BYTES
            copier.run([partial(arena.populate, begin, step) for begin in range(0, arena.size_bytes, step)])
            arena.is_new = False
        # start device transfers first, and copy host tensors meanwhile
        arrivals = [self._queue(device, ready) for device, ready in self._ready.items()]
        try:
            self._copy_host()
        finally:
            for arrival in arrivals:
                arrival.synchronize()
        return self._differing(self.layout.memory)

    def _copy_host(self) -> None:
        """Copy the sources in host memory."""
        rows, sources, targets = self._here, self._sources, self.layout.memory
        sizes = self.layout.sizes_bytes[rows]
        large = sources.is_plain[rows] & (sizes >= _MEMMOVE_FROM_BYTES)
        tasks: list[Callable[[], object]] = []
        for row in rows[large].tolist():
            target, source = int(targets.pointers[row]), int(sources.pointers[row])
            end = int(self.layout.sizes_bytes[row])
            tasks += [
                partial(_memmove, target + begin, source + begin, min(_TASK_BYTES, end - begin))
                for begin in range(0, end, _TASK_BYTES)
            ]
        small, total = rows[~large], np.cumsum(sizes[~large])
        cuts = np.searchsorted(total, np.arange(_TASK_BYTES, total[-1] if len(total) else 0, _TASK_BYTES))
        tasks += [partial(self._copy_rows, part.tolist()) for part in np.split(small, cuts) if len(part)]
        self._copier.run(tasks, int(sizes.sum()) // _TASK_BYTES)

    def _queue(self, device: torch.device, ready: torch.Event) -> torch.Event:
        """Queue the copies from ``device`` on a separate stream after ``ready``; return an event for their
        completion.
        """
        streams = self._copier.streams
        stream = streams.get(device)
        if stream is None:
            stream = streams[device] = torch.Stream(device=device)
        stream.wait_event(ready)
        with stream:
            here = [row for row in self._elsewhere if self._sources.tensors[row].device == device]
            self._copy_rows(here, non_blocking=True)
            arrival = torch.Event(device=device)
            arrival.record(stream)
        return arrival

    def _copy_rows(self, rows: Sequence[int], *, non_blocking: bool = False) -> None:
        targets, sources = self.layout.memory.tensors, self._sources.tensors
        # Copy bools as bytes, because torch would change values other than 0 and 1. Also types that torch
        # cannot copy.
        with torch.no_grad():
            to = [as_copied(targets[row]) for row in rows]
            of = [as_copied(sources[row]) for row in rows]
            copy_tensors(to, of, non_blocking=non_blocking)
