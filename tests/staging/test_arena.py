"""Host memory for copies: used again, given back with its last view, and an error where there is none."""

from __future__ import annotations

import gc
import os
import resource

import pytest
import torch

from dcp.errors import StagingError
from dcp.staging import HostArena, StagingMemoryError
from tests.support.processes import mapped_files, open_files

MIB = 1 << 20
KINDS = pytest.mark.parametrize("kind", ["private", "shared"])


def bytes_of(arena: HostArena) -> torch.Tensor:
    """The whole arena as a uint8 tensor; it keeps the mapping alive."""
    return torch.frombuffer(arena.memory, dtype=torch.uint8)


def arenas_here() -> tuple[int, int, int]:
    """How many memory files of arenas this process has open, and mapped; how many names in /dev/shm."""
    files, mapped = open_files(), mapped_files()
    counts = [sum("memfd:dcp-staging" in line for line in lines) for lines in (files, mapped)]
    return counts[0], counts[1], sum("/dev/shm/" in line for line in files + mapped)


@KINDS
def test_an_arena_is_not_allocated_again_while_it_is_big_enough(kind: str) -> None:
    """The mapping stays for any smaller size, and is replaced for a larger one."""
    arena = HostArena(kind)  # type: ignore[arg-type]
    arena.reserve(3 * MIB)
    address, size_bytes = arena.address, arena.size_bytes
    for smaller in (0, 1, 3 * MIB, size_bytes):
        arena.reserve(smaller)
    assert (arena.address, arena.size_bytes, arena.generation) == (address, size_bytes, 1)
    arena.reserve(size_bytes + 1)
    assert arena.size_bytes > size_bytes >= 3 * MIB and arena.generation == 2
    assert bytes_of(arena).numel() == arena.size_bytes
    arena.close()


@KINDS
def test_tensors_outlive_growth_and_close(kind: str) -> None:
    """Views of an arena stay readable and writable when that grows or is closed, twice."""
    arena = HostArena(kind)  # type: ignore[arg-type]
    arena.reserve(MIB)
    old = bytes_of(arena)[:4096].fill_(7)
    arena.reserve(8 * MIB)
    new = bytes_of(arena)[-4096:].fill_(9)
    for _ in range(2):
        arena.close()
    gc.collect()
    assert (old == 7).all() and (new == 9).all() and (old.fill_(8) == 8).all()
    for act in (lambda: bytes_of(arena), lambda: arena.reserve(1)):
        with pytest.raises(StagingError, match="closed"):
            act()


def test_a_shared_arena_takes_one_descriptor_and_is_gone_with_its_views() -> None:
    """One file descriptor, which no program inherits, and one mapping; no name in /dev/shm; nothing after the
    last view, nor after one that was forgotten."""
    gc.collect()
    files, mapped, names = arenas_here()
    arena = HostArena("shared")
    arena.reserve(4 * MIB)
    view = bytes_of(arena)[:10]
    assert arenas_here() == (files + 1, mapped + 1, names)
    assert arena.fd is not None and not os.get_inheritable(arena.fd)
    arena.close()
    assert arena.fd is None and arenas_here() == (files, mapped + 1, names)
    del view
    assert arenas_here() == (files, mapped, names)
    arena = HostArena("shared")
    arena.reserve(MIB)
    del arena
    assert arenas_here() == (files, mapped, names)


def test_a_child_reads_a_shared_arena_through_a_duplicate_of_its_descriptor() -> None:
    """Another process sees the staged bytes, and the child's end takes nothing from them."""
    arena = HostArena("shared")
    arena.reserve(MIB)
    bytes_of(arena)[:5] = torch.tensor(list(b"state"), dtype=torch.uint8)
    assert arena.fd is not None
    duplicate = os.dup(arena.fd)
    if (child := os.fork()) == 0:
        is_seen = os.pread(duplicate, 5, 0) == b"state"
        del arena
        os._exit(not is_seen)
    assert os.waitpid(child, 0)[1] == 0
    os.close(duplicate)
    assert bytes(bytes_of(arena)[:5].tolist()) == b"state"
    arena.close()


@KINDS
def test_memory_that_is_not_there_is_an_error_at_once(kind: str) -> None:
    """Asking for more than the machine has names both figures, and leaves the arena as it was."""
    arena = HostArena(kind)  # type: ignore[arg-type]
    arena.reserve(MIB)
    view = bytes_of(arena)
    with pytest.raises(StagingMemoryError, match=r"1048576\.00 GiB") as caught:
        arena.reserve(1 << 50)
    assert isinstance(caught.value, StagingError) and isinstance(caught.value, MemoryError)
    assert caught.value.needed_bytes == 1 << 50 > (caught.value.available_bytes or 0) > 0
    view.fill_(1)
    assert arena.generation == 1
    arena.close()


def test_a_full_memory_file_is_an_error_and_no_signal_later() -> None:
    """The reservation fails if the pages cannot be had, not the copy that would touch them."""
    arena = HostArena("shared")
    arena.reserve(2 * MIB)
    bytes_of(arena).fill_(5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, limits[1]))
    try:
        with pytest.raises(StagingMemoryError):
            arena.reserve(16 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (bytes_of(arena) == 5).all()
    arena.reserve(16 * MIB)
    bytes_of(arena).fill_(6)
    arena.close()


def test_pinned_memory_is_for_accelerators() -> None:
    """Page-locked where there is one; a typed error that says what to use instead where not."""
    if not torch.accelerator.is_available():
        with pytest.raises(StagingError, match="private"):
            HostArena("pinned")
        return
    arena = HostArena("pinned")
    arena.reserve(MIB)
    assert bytes_of(arena).is_pinned()
    arena.close()
