"""Host memory for staged copies: one large mapping, reused by saves.

Mappings are made by `ctypes`, because the `mmap` module duplicates the file descriptor and refuses to unmap
while tensors view the memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, Literal

import torch

from dcp.storage.errors import StagingError

ArenaKind = Literal["private", "shared"]

PAGES_BYTES = 2 << 20
"""Sizes are multiples of a huge page."""
_MADV_HUGEPAGE, _MADV_DONTFORK, _MADV_POPULATE_WRITE = 14, 10, 23
_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.argtypes = (_pointer, _size, _int, _int, _int, ctypes.c_long)
_libc.munmap.argtypes = (_pointer, _size)
_libc.madvise.argtypes = (_pointer, _size, _int)
_Memory = ctypes.Array[ctypes.c_ubyte]
_MAP_FAILED = ctypes.c_void_p(-1).value


class StagingMemoryError(StagingError, MemoryError):
    """The host lacks memory of the requested kind: ``needed_bytes`` of ``available_bytes``."""

    available_bytes: int | None = None
    needed_bytes: int | None = None


class HostArena:
    """Host mapping with staged tensors as views. Not thread-safe; one save at a time uses an arena.

    ``private`` memory belongs to this process, without forked children. ``shared`` memory is an unnamed
    memory file, which other processes map through a duplicate of ``fd``, and which disappears with the last
    of them. ``page_locked`` locks the memory for the accelerator (for ``shared``, CUDA only).
    """

    def __init__(self, kind: ArenaKind = "private", *, page_locked: bool = False) -> None:
        self.kind: ArenaKind = kind
        # only on request: locking creates a CUDA context
        self.page_locked = page_locked
        self.size_bytes = 0
        self.generation = 0
        self.is_new = False
        """True until the pages of the mapping are touched for the first time."""
        self.fd: int | None = None
        self.layout: Any = None
        """The latest views made by `copies.lay_out`."""
        self._memory: _Memory | None = None
        self._close_fd: weakref.finalize[[int, int], HostArena] | None = None
        if kind == "shared":
            try:
                self.fd = os.memfd_create("dcp-staging", os.MFD_CLOEXEC)
            except OSError as error:
                raise StagingError(f"cannot create a memory file for staging: {error.strerror}") from error
            self._close_fd = weakref.finalize(self, _close, self.fd, os.getpid())
        self.closed = False

    def reserve(self, size_bytes: int) -> None:
        """Ensure a size of at least ``size_bytes``.

        Growing replaces the mapping and increments ``generation``. Tensors that view the old mapping stay
        valid. Raises StagingMemoryError, without a change, if memory is short.
        """
        if self.closed:
            raise StagingError("this arena is closed")
        if size_bytes <= self.size_bytes and self._memory is not None:
            return
        size = max(-(-size_bytes // PAGES_BYTES), 1) * PAGES_BYTES
        available = _available_bytes()
        # the kernel overcommits, and would kill the process on a write
        if available is not None and size - self.size_bytes > available:
            raise _no_memory(self.kind, size)
        if self.kind != "shared":
            # drop the old pages before allocating new ones
            self._memory, self.size_bytes = None, 0
        self._memory = self._mapped(size)
        self.size_bytes = size
        self.generation += 1
        self.is_new = not self.page_locked  # locking touches them

    def populate(self, offset: int, size_bytes: int) -> None:
        """Allocate the pages of a range (multiples of pages) at once. Thread-safe.

        Raises StagingMemoryError if memory is short. No effect on kernels before 5.14.
        """
        size_bytes = min(size_bytes, self.size_bytes - offset)
        if _libc.madvise(self.address + offset, size_bytes, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code in (errno.ENOMEM, errno.EFAULT):
                raise _no_memory(self.kind, self.size_bytes)

    @property
    def memory(self) -> _Memory:
        """The mapping as a buffer, which keeps the mapping alive."""
        if self._memory is None:
            raise StagingError("this arena is closed" if self.closed else "nothing is reserved in this arena")
        return self._memory

    @property
    def address(self) -> int:
        """Address of the mapping in this process."""
        return ctypes.addressof(self.memory)

    def close(self) -> None:
        """Release memory and descriptor. Idempotent. Tensors that view the memory stay valid."""
        self.closed = True
        self.layout = self._memory = None
        self.size_bytes = 0
        if self._close_fd is not None:
            self._close_fd()
            self.fd = None

    def _mapped(self, size_bytes: int) -> _Memory:
        """Map memory that is unmapped with the last view."""
        cuda = torch.cuda.is_available()
        lock, flags = self.page_locked and cuda, mmap.MAP_SHARED
        if self.fd is None and self.page_locked and not cuda:
            return _pinned(size_bytes)
        if self.fd is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        else:
            try:  # Allocate all pages now: if memory runs out during the copy, the process would get SIGBUS.
                os.posix_fallocate(self.fd, 0, size_bytes)
            except OSError as error:
                os.ftruncate(self.fd, self.size_bytes)
                raise _no_memory(self.kind, size_bytes) from error
        protection, fd = mmap.PROT_READ | mmap.PROT_WRITE, -1 if self.fd is None else self.fd
        address = _libc.mmap(None, size_bytes, protection, flags, fd, 0)
        if address is None or address == _MAP_FAILED:
            cause = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            raise _no_memory("mapped", size_bytes) from cause
        if self.fd is None:
            # After a fork, the next staging would copy every page for the child.
            _libc.madvise(address, size_bytes, _MADV_DONTFORK)
        if lock:
            # Huge pages reduce the number of pages to lock. Other mappings do not gain, and the first copy
            # would wait.
            _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
            _page_lock(address, size_bytes)
        memory = (ctypes.c_ubyte * size_bytes).from_address(address)
        finalizer = weakref.finalize(memory, _unmap, address, size_bytes, lock, os.getpid())
        # At exit the kernel unmaps; until then a thread may be copying.
        finalizer.atexit = False
        return memory


def _no_memory(kind: str, needed_bytes: int) -> StagingMemoryError:
    available = _available_bytes()
    there = "" if available is None else f", {available / 2**30:.2f} GiB are available"
    return StagingMemoryError(
        f"staging needs {needed_bytes / 2**30:.2f} GiB of {kind} host memory{there}; "
        "stage fewer saves at once, shard the state over more hosts, or save synchronously",
        needed_bytes=needed_bytes,
        available_bytes=available,
    )


def _page_lock(address: int, size_bytes: int) -> None:
    """Page-lock exactly this range; torch's pinned allocator rounds up to powers of two and keeps the
    memory.
    """
    status = int(_cuda().cudaHostRegister(address, size_bytes, _PORTABLE))
    if status != 0:
        _libc.munmap(address, size_bytes)
        raise StagingMemoryError(
            f"{size_bytes / 2**30:.2f} GiB of host memory could not be page-locked (CUDA error {status}); "
            "stage with StagingOptions(use_pinned_memory=False), or raise the limit of locked memory",
            needed_bytes=size_bytes,
            available_bytes=_available_bytes(),
        )


# A forked child has neither the private mapping nor a use for the descriptor, and other objects may have the
# same address and number.


def _unmap(address: int, size_bytes: int, locked: bool, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        if locked:
            _cuda().cudaHostUnregister(address)
        _libc.munmap(address, size_bytes)


def _close(fd: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        os.close(fd)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _pinned(size_bytes: int) -> _Memory:
    """Return page-locked memory from the accelerator's allocator."""
    tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    weakref.finalize(memory, lambda kept: None, tensor).atexit = False
    return memory


# -- how much memory may still be taken ----------------------------------------------------------------------

_CGROUPS = Path("/sys/fs/cgroup")


def _available_bytes() -> int | None:
    """Estimate the available memory of the machine and its control groups (version 2); None if unknown."""
    machine = _fields(Path("/proc/meminfo"))
    known = []
    if "MemAvailable:" in machine:
        known.append((machine["MemAvailable:"] + machine.get("SwapFree:", 0)) * 1024)
    path = next((line[3:] for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), None)
    if path is not None:
        group = _CGROUPS / path.strip("/")
        known += [left for folder in (group, *group.parents) if (left := _left_in(folder)) is not None]
    return min(known, default=None)


def _left_in(group: Path) -> int | None:
    """Return the bytes left in a control group; None without a limit."""
    limit, used = (_lines(group / name) for name in ("memory.max", "memory.current"))
    if not limit or not used or not limit[0].isdecimal():
        return None
    stat = _fields(group / "memory.stat")
    # the page cache is reclaimable
    reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return max(0, int(limit[0]) - int(used[0]) + reclaimable)


def _fields(path: Path) -> dict[str, int]:
    words = [line.split() for line in _lines(path)]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
