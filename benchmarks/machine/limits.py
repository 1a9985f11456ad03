"""Limits of the machine for the same bytes.

Each function returns seconds, and neither checks nor plans anything.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dcp.storage.formats.opening import open_index
from dcp.storage.stores import open_store

__all__ = ["RawReads", "StateCopy", "copy_memory", "write_direct", "write_page_cache"]

_PIECE_BYTES = 8 << 20
_ARENA_BYTES = 64 << 20
"""Twice the usual last-level cache, so that writes come from memory as those of tensors do."""
_MAX_BUFFERS = 1000
_GAP_BYTES = 64 << 10


def _address_view(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


def _arena() -> memoryview:
    arena = memoryview(mmap.mmap(-1, _ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for begin in range(0, _ARENA_BYTES, 1 << 20):
        arena[begin : begin + (1 << 20)] = os.urandom(4096) * 256
    return arena


_arenas: list[memoryview] = []


def _shared_arena() -> memoryview:
    if not _arenas:
        _arenas.append(_arena())
    return _arenas[0]


class RawReads:
    """Plain preadv of the payloads of a dcphub checkpoint into the saved tensors.

    Neighbouring payloads are read by one call, with the header bytes between them going to a scratch buffer,
    so that no plan needs fewer calls. Each rank reads the chunks that equal its own tensors.
    """

    def __init__(
        self, folder: Path, tensors: dict[str, torch.Tensor], offsets: dict[str, tuple[int, ...]]
    ) -> None:
        index = open_index(open_store(folder))
        self._descriptors: dict[int, int] = {}
        self._scratch = memoryview(bytearray(_GAP_BYTES))
        found: list[tuple[int, int, int, int]] = []
        for chunk in range(index.chunk_count):
            fqn = index.fqns[int(index.chunk_tensors[chunk])]
            if fqn in tensors and index.box(chunk)[0] == offsets.get(fqn, ()):
                file, size = int(index.chunk_files[chunk]), int(index.payload_lengths[chunk])
                found.append((file, int(index.payload_offsets[chunk]), size, tensors[fqn].data_ptr()))
                if file not in self._descriptors:
                    self._descriptors[file] = os.open(folder / index.files[file], os.O_RDONLY)
        self.size_bytes = sum(size for _, _, size, _ in found)
        self._calls = self._batches(sorted(found))

    def _batches(self, found: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, list[memoryview]]]:
        calls: list[tuple[int, int, list[memoryview]]] = []
        last_file = last_end = -1
        batch_bytes = 0
        for file, begin, size, start in found:
            done = 0
            while done < size:
                part = min(_PIECE_BYTES, size - done)
                offset = begin + done
                gap = offset - last_end
                joins = file == last_file and 0 <= gap <= _GAP_BYTES and batch_bytes + part <= _PIECE_BYTES
                if joins and len(calls[-1][2]) < _MAX_BUFFERS:
                    if gap:
                        calls[-1][2].append(self._scratch[:gap])
                else:
                    calls.append((self._descriptors[file], offset, []))
                    batch_bytes = 0
                calls[-1][2].append(_address_view(start + done, part))
                batch_bytes += part
                last_file, last_end = file, offset + part
                done += part
        return calls

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, threads: int) -> float:
        """Read all payloads; return seconds."""
        pending = iter(self._calls)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    call = next(pending, None)
                if call is None:
                    return
                wanted = sum(map(len, call[2]))
                if os.preadv(call[0], call[2], call[1]) != wanted:
                    raise OSError(f"a read of {wanted} bytes came back short")

        begun = time.perf_counter()
        others = [threading.Thread(target=work) for _ in range(threads - 1)]
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()
        return time.perf_counter() - begun


def copy_memory(tensors: Sequence[torch.Tensor]) -> float:
    """Return seconds to copy the bytes of the tensors once, in one thread, to warm memory beyond the
    caches."""
    arena = _shared_arena()
    target = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    at = 0
    begun = time.perf_counter()
    for tensor in tensors:
        address, left = tensor.data_ptr(), tensor.nbytes
        while left:
            part = min(left, _ARENA_BYTES - at)
            ctypes.memmove(target + at, address, part)
            address, left, at = address + part, left - part, (at + part) % _ARENA_BYTES
    return time.perf_counter() - begun


class StateCopy:
    """A memcpy of each tensor to a buffer of the size of the state: the lower bound of staging."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sources = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        self._size_bytes = max(1, sum(size_bytes for _, size_bytes in self._sources))
        self._buffer = self._new_buffer()
        self._buffer.madvise(mmap.MADV_HUGEPAGE)
        self.copy()

    def copy(self, threads: int = 1) -> None:
        """Copy to memory that was written before; return seconds."""
        self._copy_into(self._buffer, threads)

    def first_copy(self, threads: int = 1) -> None:
        """Copy to memory that was never touched; return seconds."""
        self._copy_into(self._new_buffer(), threads)

    def _new_buffer(self) -> mmap.mmap:
        return mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _copy_into(self, buffer: mmap.mmap, threads: int) -> None:
        """Copy the tensors from a shared queue, in several threads."""
        copies: deque[tuple[int, int, int]] = deque()
        at = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for source, size_bytes in self._sources:
            copies.append((at, source, size_bytes))
            at += size_bytes

        def work() -> None:
            while True:
                try:
                    target, source, size_bytes = copies.popleft()
                except IndexError:
                    return
                ctypes.memmove(target, source, size_bytes)

        _in_threads([work] * threads)


def write_direct(path: Path, size_bytes: int) -> float:
    """Return seconds to write a new file of ``size_bytes`` with O_DIRECT and one fsync; `nan` if refused."""
    arena = _shared_arena()
    padded = -(-size_bytes // 4096) * 4096
    begun = time.perf_counter()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    except OSError:
        return float("nan")
    try:
        os.posix_fallocate(descriptor, 0, padded)
        _write(descriptor, arena, 0, padded)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - begun


def write_page_cache(paths: Sequence[Path], size_bytes: int) -> float:
    """Return seconds to write ``size_bytes`` without fsync to several new files, one thread per file."""
    arena = _shared_arena()
    share = -(-size_bytes // len(paths))

    def work(path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            _write(descriptor, arena, 0, share)
        finally:
            os.close(descriptor)

    return _in_threads([lambda path=path: work(path) for path in paths])  # type: ignore[misc]


def _write(descriptor: int, arena: memoryview, offset: int, size_bytes: int) -> None:
    done = 0
    while done < size_bytes:
        at = done % _ARENA_BYTES
        part = min(_PIECE_BYTES, size_bytes - done, _ARENA_BYTES - at)
        done += os.pwrite(descriptor, arena[at : at + part], offset + done)


def _in_threads(jobs: Sequence[Callable[[], None]]) -> float:
    begun = time.perf_counter()
    threads = [threading.Thread(target=job) for job in jobs[1:]]
    for thread in threads:
        thread.start()
    jobs[0]()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun
