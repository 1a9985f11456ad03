"""Bounce buffers: page-aligned memory that is reused, because first touch of fresh memory costs ten copies.

O_DIRECT needs aligned memory, and a caller's tensors rarely are. The pool keeps a bounded number of buffers
of one size for the life of the process. It never blocks: a handle that waits for a buffer waits for one of
its own that is on its way to the disk, so that many files open at once cannot starve each other.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Final

import numpy as np

ALIGNMENT_BYTES: Final = 4096
"""Of memory, file offset and length in O_DIRECT writes; a device that wants more is served buffered."""

BUFFER_BYTES: Final = 8 << 20
_COUNT: Final = 4

RELEASE_GIL_BYTES: Final = 64 << 10
"""Copies from this size on let other threads run."""


class BounceBuffer:
    """One aligned block of memory. ``view`` is writable, and has `BUFFER_BYTES`."""

    __slots__ = ("__weakref__", "generation", "view")

    def __init__(self, generation: int) -> None:
        # Private, not shared: after a fork the child's writes must not reach a file that the parent writes.
        memory = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(memory)
        self.generation = generation


class BufferPool:
    """Keeps up to `_COUNT` buffers. Thread-safe; starts afresh in a forked child.

    A buffer that an interrupted caller lost counts no more once it is garbage.
    """

    def __init__(self) -> None:
        self._generation = 0
        self.start_afresh()

    def start_afresh(self) -> None:
        """Forget all, in a forked child: the lock may be held by a thread that does not exist here, and
        buffers that were out belong to handles of the parent."""
        self._lock = threading.Lock()
        self._free: list[BounceBuffer] = []
        self._out: weakref.WeakSet[BounceBuffer] = weakref.WeakSet()
        self._generation += 1

    def take(self, *, is_first: bool) -> BounceBuffer | None:
        """Hand out a buffer; None for another than the first one of a file if `_COUNT` are out.

        Without a first one no progress is possible; a second one is to overlap copy and write.
        """
        with self._lock:
            if not is_first and len(self._out) >= _COUNT:
                return None
            buffer = self._free.pop() if self._free else BounceBuffer(self._generation)
            self._out.add(buffer)
            return buffer

    def give(self, buffer: BounceBuffer) -> None:
        """Return a buffer; one that is beyond the bound, or from before a fork, is let go."""
        with self._lock:
            if buffer.generation != self._generation:
                return
            self._out.discard(buffer)
            if len(self._out) + len(self._free) < _COUNT:
                self._free.append(buffer)


POOL: Final = BufferPool()
"""The pool of this process."""

os.register_at_fork(after_in_child=POOL.start_afresh)


def copy_bytes(target: memoryview, source: bytes | memoryview) -> None:
    """Copy into a view of bytes of the same length; large copies let other threads run (release the GIL)."""
    if len(source) < RELEASE_GIL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
