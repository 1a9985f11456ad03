"""Memory by address: views of buffers that another library owns."""

from __future__ import annotations

import ctypes

__all__ = ["view"]


def view(address: int, size_bytes: int) -> memoryview:
    """A writable view of ``size_bytes`` at ``address``; the caller keeps the owner alive."""
    if size_bytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")
