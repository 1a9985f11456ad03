"""Page cache of checkpoint files: fill it for warm reads, empty and check it for cold reads."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["data_files", "evict", "resident_fraction", "warm"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_STEP_BYTES = 4 << 20


def data_files(folder: Path) -> list[Path]:
    """Return all files of a checkpoint, including small files, or of a folder of checkpoints."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def warm(files: Iterable[Path]) -> None:
    """Read every file once into a reused buffer."""
    buffer = memoryview(bytearray(_STEP_BYTES))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(files: Iterable[Path]) -> None:
    """Write out dirty pages of the files, then drop all pages."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_fraction(files: Iterable[Path]) -> float:
    """Return the fraction of the files' pages in the page cache, by mincore."""
    resident = total = 0
    for path in files:
        size = path.stat().st_size
        if size == 0:
            continue
        pages = -(-size // mmap.PAGESIZE)
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
            found = (ctypes.c_ubyte * pages)()
            start = ctypes.c_char.from_buffer(
                mapped
            )  # the address is available because a private mapping is writable
            code = _libc.mincore(ctypes.addressof(start), size, found)
            del start
        if code:
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        resident += sum(byte & 1 for byte in bytes(found))
        total += pages
    return resident / total if total else 0.0
