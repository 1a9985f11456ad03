"""Host memory for staged copies: reused, released with its last view, and an error if it is exhausted."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from dcp.errors import StagingError
from dcp.staging import HostArena, StagingMemoryError
from tests.support.processes import mapped_files, open_files

MIB = 1 << 20
KINDS = pytest.mark.parametrize("kind", ["private", "shared"])


def bytes_of(arena: HostArena) -> torch.Tensor:
    """Return the whole arena as a uint8 tensor, which keeps the mapping alive."""
    return torch.frombuffer(arena.memory, dtype=torch.uint8)


def arenas_here() -> tuple[int, int, int]:
    """Return the number of open and of mapped memory files of arenas, and of names in /dev/shm."""
    files, mapped = open_files(), mapped_files()
    counts = [sum("memfd:dcp-staging" in line for line in lines) for lines in (files, mapped)]
    return counts[0], counts[1], sum("/dev/shm/" in line for line in files + mapped)


@KINDS
def test_tensors_outlive_growth_and_close(kind: str) -> None:
    """Views of an arena stay readable and writable when the arena grows or is closed twice."""
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


def test_a_shared_arena_has_one_descriptor_and_no_name() -> None:
    """A shared arena has one descriptor, which is not inherited, one mapping, and no name in /dev/shm. All
    are released with the last view, or with the arena object if it was never closed."""
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


@KINDS
def test_too_much_memory_is_an_error_at_once(kind: str) -> None:
    """A request for more memory than the machine has names both sizes, and leaves the arena unchanged."""
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
