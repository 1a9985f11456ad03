"""Memory by address: views of buffers that another library owns."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from dcp.storage.geometry.strides import Int64, extent

_WRITABLE = 0x200
_KEPT_BUFFERS = 8

# Not (c_ubyte * size).from_address(address), which creates a class for every size in 9 microseconds.
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

_MEMMOVE = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

copy_small = _MEMMOVE(("memmove", ctypes.PyDLL(None)))
"""Copy like `ctypes.memmove` but keep the GIL: ``copy_small(target, source, size_bytes)``, for some
kilobytes.
"""


def view(address: int, size_bytes: int) -> memoryview:
    """Return a writable view of ``size_bytes`` at ``address``; the caller keeps the owner alive."""
    if size_bytes == 0:
        return memoryview(bytearray())
    return cast(memoryview, _memory_view(address, size_bytes, _WRITABLE))


def item_view(column: npt.NDArray[Any]) -> memoryview[int]:
    """Return a column as a memoryview of Python integers, faster than numpy scalars. Contiguous columns are
    not copied.
    """
    return np.ascontiguousarray(column).data


GATHERED_BYTES = 32
"""Maximum size for a vectorized byte copy."""


def gather_small(addresses: Int64, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the ``size_bytes`` at each of ``addresses`` as rows; the caller keeps the owners alive."""
    rows = np.empty((len(addresses), size_bytes), np.uint8)
    _copy_rows(addresses, rows, scatter=False)
    return rows


def scatter_small(addresses: Int64, rows: npt.NDArray[np.uint8]) -> None:
    """Copy each row of a C-ordered table to its address; inverse of `gather_small`."""
    _copy_rows(addresses, rows, scatter=True)


def _copy_rows(addresses: Int64, rows: npt.NDArray[np.uint8], *, scatter: bool) -> None:
    size_bytes = rows.shape[1]
    if not rows.size:
        return
    if size_bytes <= GATHERED_BYTES:
        # All memory from the first to the last address; memory between the owners is never accessed.
        low = int(addresses.min())
        memory = np.frombuffer(view(low, int(addresses.max()) + size_bytes - low), np.uint8)
        places = (addresses - low)[:, None] + np.arange(size_bytes)
        if scatter:
            memory[places] = rows
        else:
            rows[:] = memory[places]
        return
    first = rows.ctypes.data
    starts = range(first, first + rows.nbytes, size_bytes)
    sources, targets = (starts, addresses.tolist()) if scatter else (addresses.tolist(), starts)
    for target, source in zip(targets, sources, strict=True):
        copy_small(target, source, size_bytes)


_ITEMS = {
    size: np.dtype(code) for size, code in ((1, "u1"), (2, "<u2"), (4, "<u4"), (8, "<u8"), (16, "<c16"))
}


def item_dtype(itemsize: int) -> np.dtype[Any]:
    """Return the dtype for copying elements of ``itemsize`` bytes: unsigned integers, or complex128 for 16
    bytes.
    """
    return _ITEMS[itemsize]


def array_at(
    address: int, itemsize: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Return an array of `item_dtype` at ``address``; ``strides`` are in bytes, ``sizes`` have no 0."""
    memory = view(address, extent(sizes, strides, itemsize))
    return np.ndarray(sizes, _ITEMS[itemsize], memory, 0, strides)


_MAPPINGS = Path("/proc/self/maps")
_FIXED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) [r-]-", re.MULTILINE)


def is_read_only(addresses: Int64) -> npt.NDArray[np.bool_]:
    """Return a mask of read-only ``addresses``; all False on systems other than Linux.

    Writing to read-only memory kills the process or looks like a read failure.
    """
    try:
        found = _FIXED.findall(_MAPPINGS.read_text())
    except OSError:
        return np.zeros(len(addresses), np.bool_)
    bounds = np.array([int(number, 16) for ends in found for number in ends], np.uint64)  # ascending
    within: npt.NDArray[np.bool_] = np.searchsorted(bounds, addresses.astype(np.uint64), "right") % 2 == 1
    return within


class Place(NamedTuple):
    """Non-empty box of elements in memory: address of the first, item size, sizes, strides in bytes."""

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


_MOST_WORK: Any = 10_000
_NOWHERE = 1 << 62


def share_memory(first: Place, second: Place) -> bool:
    """Return True if elements of both share a byte, or if the strides are too complex to decide quickly."""
    return bool(np.may_share_memory(array_at(*first), array_at(*second), max_work=_MOST_WORK))


def repeats_places(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if two elements of a box share a position, as in an expanded tensor; ``strides`` in
    elements.
    """
    if 0 in sizes:
        return False
    inner: list[tuple[int, int]] = []
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(sizes, strides, strict=True) if size > 1):
        if step <= reach or not step:
            # compare steps along this dimension with the extent of the inner dimensions, in both directions
            along = Place(_NOWHERE + step, 1, (size - 1,), (step,))
            back = tuple(2 * count - 1 for _, count in inner)
            if share_memory(along, Place(_NOWHERE - reach, 1, back, tuple(each for each, _ in inner))):
                return True
        inner.append((step, size))
        reach += (size - 1) * step
    return False


class ScratchBuffers:
    """Reused buffers of equal size, because fresh memory is slow to touch.

    ``allocate`` creates a buffer. No lock is used, because a forked child could inherit a held lock.
    """

    def __init__(
        self,
        size_bytes: int,
        allocate: Callable[[int], memoryview] = lambda size_bytes: np.empty(size_bytes, np.uint8).data,
    ) -> None:
        self._size_bytes = size_bytes
        self._allocate = allocate
        self._free: list[memoryview] = []

    def get(self, size_bytes: int = 0) -> memoryview:
        """Return a buffer of at least ``size_bytes`` with undefined content."""
        if size_bytes <= self._size_bytes:
            with suppress(IndexError):
                return self._free.pop()
        return self._allocate(max(size_bytes, self._size_bytes))

    def put(self, buffer: memoryview) -> None:
        """Return a buffer for reuse."""
        if len(buffer) == self._size_bytes and len(self._free) < _KEPT_BUFFERS:
            self._free.append(buffer)
