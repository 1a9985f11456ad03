"""Copying tensors into host memory: by bytes over threads, or on a stream beside the training's."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from dcp.staging.memory.arena import PAGES_BYTES, HostArena
from dcp.storage.formats.index import Int64
from dcp.storage.tensors import as_copied
from dcp.storage.torch_compat import copy_tensors

__all__ = ["DeviceWork", "HostCopier", "HostCopies", "default_threads", "resolved"]

_MEMMOVE_FROM_BYTES = 128 << 10
"""From here on one memmove a tensor costs less than torch's loop, and does not wake torch's own threads."""
_SHARE_BYTES = 8 << 20
"""A thread with less to copy is not worth waking."""
_SHARES_PER_THREAD = 8
"""So that a thread whose core is wanted elsewhere takes fewer of them, and the others do not wait for it."""
_MAX_THREADS = 8
"""Some cores saturate the memory; more only take them from the training."""

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without autograd; by value where it is a lazily conjugated or negated view."""
    return tensor.detach().resolve_conj().resolve_neg()


def default_threads() -> int:
    """Threads that copy: this process's share of the cores it may run on, eight at most."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    neighbours = int(ranks) if ranks.isdecimal() else 1
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // max(1, neighbours)))


@dataclass(frozen=True, eq=False)
class HostCopies:
    """What to copy: ``targets`` are contiguous host tensors of the shapes and dtypes of ``sources``, which
    are strided, of any device.

    By number: ``pointers`` and ``target_pointers`` are addresses, ``contiguous`` says which sources are
    contiguous host memory.
    """

    targets: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    sizes_bytes: Int64
    itemsizes: Int64
    pointers: Int64
    target_pointers: Int64
    contiguous: np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass
class _Share:
    """A part of what is to be copied: rows of tensors for torch, rows of those with elements of one byte,
    and (target, source, size) of raw memory."""

    tensors: list[int] = field(default_factory=list)
    bytes_each: list[int] = field(default_factory=list)
    memory: list[tuple[int, int, int]] = field(default_factory=list)


class HostCopier:
    """Copies tensors of the host with up to ``threads`` threads, which it starts when they are needed."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads if threads is not None else default_threads()
        self._helpers = ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix="dcp-copy")

    def copy(self, copies: HostCopies, rows: Int64) -> None:
        """Copy the sources of these numbers; returns when they are there."""
        shares = _shares(copies, rows, self.threads * _SHARES_PER_THREAD)
        self._run([partial(_carry_out, copies, share) for share in shares])

    def populate(self, arena: HostArena) -> None:
        """Have the pages of an arena that is new, which the copy would get by a fault each."""
        step = max(_SHARE_BYTES, arena.size_bytes // self.threads // _SHARES_PER_THREAD)
        step -= step % PAGES_BYTES
        self._run([partial(arena.populate, begin, step) for begin in range(0, arena.size_bytes, step)])
        arena.is_new = False

    def close(self) -> None:
        """End the threads; idempotent."""
        self._helpers.shutdown()

    def _run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Do them all, each thread the next one when it has time for it; the first failure ends it.

        Nothing is under way any more when this returns, whatever happens.
        """
        left = deque(tasks)

        def work() -> None:
            try:
                while task := _next(left):
                    task()
            except BaseException:
                left.clear()
                raise

        others = [self._helpers.submit(work) for _ in range(min(self.threads, len(tasks)) - 1)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()


def _next(left: deque[Callable[[], None]]) -> Callable[[], None] | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def _shares(copies: HostCopies, rows: Int64, most: int) -> list[_Share]:
    """At most so many parts of about equal bytes; a large tensor may be cut."""
    sizes = copies.sizes_bytes[rows]
    total = int(sizes.sum())
    parts = max(1, min(most, total // _SHARE_BYTES))
    shares = [_Share() for _ in range(parts)]
    ends = np.cumsum(sizes)
    begins = ends - sizes
    raw = copies.contiguous[rows] & (sizes >= _MEMMOVE_FROM_BYTES)
    owners = np.minimum(begins * parts // max(total, 1), parts - 1)
    one_byte = copies.itemsizes[rows] == 1
    for part, share in enumerate(shares):
        mine = ~raw & (owners == part)
        share.tensors = rows[mine & ~one_byte].tolist()
        share.bytes_each = rows[mine & one_byte].tolist()
    bounds = [total * part // parts for part in range(parts + 1)]
    for place in np.flatnonzero(raw).tolist():
        row, begin, end = int(rows[place]), int(begins[place]), int(ends[place])
        target, source = int(copies.target_pointers[row]), int(copies.pointers[row])
        for part in range(int(owners[place]), parts):
            first, last = max(begin, bounds[part]), min(end, bounds[part + 1])
            if last > first:
                shares[part].memory.append((target + first - begin, source + first - begin, last - first))
            if last == end:
                break
    return shares


def _carry_out(copies: HostCopies, share: _Share) -> None:
    for target, source, size_bytes in share.memory:
        _memmove(target, source, size_bytes)
    _copy_tensors(copies, share.tensors, share.bytes_each, non_blocking=False)


def _copy_tensors(
    copies: HostCopies, rows: Sequence[int], bytes_each: Sequence[int], *, non_blocking: bool
) -> None:
    targets = [copies.targets[row] for row in rows]
    sources = [copies.sources[row] for row in rows]
    # As bytes where an element is one: of a bool torch would make 1 of any other value, and some types it
    # cannot copy.
    targets += [as_copied(copies.targets[row]) for row in bytes_each]
    sources += [as_copied(copies.sources[row].detach()) for row in bytes_each]
    if targets:
        with torch.no_grad():
            copy_tensors(targets, sources, non_blocking=non_blocking)


class DeviceWork:
    """Copies from accelerators, each on a stream of its own behind what was queued when this was made.

    Make it in the thread that computes; `begin` may then run in another.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._ready: dict[torch.device, torch.Event] = {}
        for device in devices:
            event = torch.Event(device=device)
            event.record(torch.accelerator.current_stream(device))
            self._ready[device] = event

    def begin(
        self, copies: HostCopies, rows: Sequence[int], streams: dict[torch.device, torch.Stream]
    ) -> Callable[[], None]:
        """Queue the copies of ``rows``; the result waits until they are on the host, while kernels of other
        streams run on.

        ``streams`` keeps the streams from one staging to the next. The caller keeps the sources until then,
        so that their memory is not handed out again.
        """
        waiting: list[torch.Event] = []
        for device, ready in self._ready.items():
            here = [row for row in rows if copies.sources[row].device == device]
            bytes_each = [row for row in here if copies.itemsizes[row] == 1]
            larger = [row for row in here if copies.itemsizes[row] != 1]
            stream = streams.get(device)
            if stream is None:
                stream = streams[device] = torch.Stream(device=device)
            stream.wait_event(ready)
            with stream:
                _copy_tensors(copies, larger, bytes_each, non_blocking=True)
                finished = torch.Event(device=device)
                finished.record(stream)
            waiting.append(finished)

        def arrive() -> None:
            for finished in waiting:
                finished.synchronize()

        return arrive
