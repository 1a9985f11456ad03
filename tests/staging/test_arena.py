"""Host memory for copies: used again, given back with its last view, and an error where there is none."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch

from dcp.errors import StagingError
from dcp.staging import HostArena, StagingMemoryError
from tests.support.processes import mapped_files, open_files

Kind = Literal["private", "shared"]
KINDS: tuple[Kind, ...] = ("private", "shared")


def bytes_of(arena: HostArena) -> torch.Tensor:
    """The whole arena as a uint8 tensor; it keeps the mapping alive."""
    return torch.frombuffer(arena.memory, dtype=torch.uint8)


def mappings_of_arenas() -> int:
    """How many memory files of arenas this process has mapped."""
    return sum("memfd:dcp-staging" in line for line in mapped_files())


def files_of_arenas() -> int:
    """How many descriptors of arenas this process has; others come and go with its threads."""
    return sum("memfd:dcp-staging" in path for path in open_files())


def names_of_this_process() -> list[str]:
    """What this process has open or mapped in /dev/shm."""
    return [line for line in open_files() + mapped_files() if "/dev/shm/" in line]


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """No file may grow beyond ``size_bytes``, memory files included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", KINDS)
def test_an_arena_is_not_allocated_again_while_it_is_big_enough(kind: Kind) -> None:
    """The mapping stays for any smaller size, and is replaced for a larger one."""
    arena = HostArena(kind)
    arena.reserve(3 << 20)
    address, size_bytes = arena.address, arena.size_bytes
    assert size_bytes >= 3 << 20
    for smaller in (0, 1, 3 << 20, size_bytes):
        arena.reserve(smaller)
    assert (arena.address, arena.size_bytes, arena.generation) == (address, size_bytes, 1)
    arena.reserve(size_bytes + 1)
    assert arena.size_bytes > size_bytes
    assert arena.generation == 2
    assert bytes_of(arena).numel() == arena.size_bytes
    arena.close()


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_outlive_growth_and_close(kind: Kind) -> None:
    """Views of an arena stay readable and writable when that grows or is closed, twice."""
    arena = HostArena(kind)
    arena.reserve(1 << 20)
    old = bytes_of(arena)[:4096]
    old.fill_(7)
    arena.reserve(8 << 20)
    new = bytes_of(arena)
    new[-4096:].fill_(9)
    arena.close()
    arena.close()
    gc.collect()
    assert (old == 7).all()
    old.fill_(8)
    assert new[-1].item() == 9
    with pytest.raises(StagingError, match="closed"):
        bytes_of(arena)
    with pytest.raises(StagingError, match="closed"):
        arena.reserve(1)


def test_a_shared_arena_takes_one_descriptor_and_is_gone_with_its_views() -> None:
    """One file descriptor an arena, one mapping, no name in /dev/shm; nothing after the last view."""
    gc.collect()
    files, mapped = files_of_arenas(), mappings_of_arenas()
    names = names_of_this_process()
    arena = HostArena("shared")
    arena.reserve(4 << 20)
    view = bytes_of(arena)[:10]
    assert files_of_arenas() == files + 1
    assert mappings_of_arenas() == mapped + 1
    assert set(names_of_this_process()) <= set(names)
    arena.close()
    assert files_of_arenas() == files
    assert mappings_of_arenas() == mapped + 1
    del view
    assert mappings_of_arenas() == mapped


def test_a_child_reads_a_shared_arena_through_a_duplicate_of_its_descriptor() -> None:
    """Another process sees the staged bytes, and the child's end takes nothing from them."""
    arena = HostArena("shared")
    arena.reserve(1 << 20)
    bytes_of(arena)[:5] = torch.tensor(list(b"state"), dtype=torch.uint8)
    assert arena.fd is not None
    duplicate = os.dup(arena.fd)
    child = os.fork()
    if child == 0:
        good = os.pread(duplicate, 5, 0) == b"state"
        del arena
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    os.close(duplicate)
    assert bytes(bytes_of(arena)[:5].tolist()) == b"state"
    arena.close()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_not_there_is_an_error_at_once(kind: Kind) -> None:
    """Asking for more than the machine has names both figures, and leaves the arena as it was."""
    arena = HostArena(kind)
    arena.reserve(1 << 20)
    view = bytes_of(arena)
    with pytest.raises(StagingMemoryError, match=r"1048576\.00 GiB") as caught:
        arena.reserve(1 << 50)
    assert isinstance(caught.value, StagingError)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.needed_bytes == 1 << 50
    assert 0 < (caught.value.available_bytes or 0) < 1 << 50
    view.fill_(1)
    arena.reserve(1 << 20)
    assert arena.generation == 1
    arena.close()


def test_a_full_memory_file_is_an_error_and_no_signal_later() -> None:
    """The reservation fails if the pages cannot be had, not the copy that would touch them."""
    arena = HostArena("shared")
    arena.reserve(2 << 20)
    bytes_of(arena).fill_(5)
    with file_size_limit(4 << 20), pytest.raises(StagingMemoryError):
        arena.reserve(16 << 20)
    assert (bytes_of(arena) == 5).all()
    arena.reserve(16 << 20)
    bytes_of(arena).fill_(6)
    arena.close()


def test_an_arena_that_is_dropped_unclosed_is_given_back() -> None:
    """Forgetting to close leaks neither memory nor a descriptor."""
    gc.collect()
    files, mapped = files_of_arenas(), mappings_of_arenas()
    arena = HostArena("shared")
    arena.reserve(1 << 20)
    del arena
    assert (files_of_arenas(), mappings_of_arenas()) == (files, mapped)


def test_the_descriptor_is_closed_in_programs_that_are_executed() -> None:
    """A subprocess of the training does not keep the memory."""
    arena = HostArena("shared")
    assert arena.fd is not None
    assert not os.get_inheritable(arena.fd)
    arena.close()
    assert arena.fd is None


def test_pinned_memory_is_for_accelerators() -> None:
    """Page-locked where there is one; a typed error that says what to use instead where not."""
    if torch.accelerator.is_available():
        arena = HostArena("pinned")
        arena.reserve(1 << 20)
        assert bytes_of(arena).is_pinned()
        arena.close()
    else:
        with pytest.raises(StagingError, match="private"):
            HostArena("pinned")
