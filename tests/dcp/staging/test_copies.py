import mmap
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.staging import DefaultStager
from dcp.staging.copies import HostCopier, default_threads
from dcp.staging.errors import StagingMemoryError
from dcp.staging.memory.arena import ArenaKind, HostArena
from tests.dcp.staging.sources import TensorSpec, bits, collect, make_tensors, tensor_specs

MIB = 1 << 20
SECONDS = 60.0


@settings(max_examples=60, deadline=None)
@given(specs=tensor_specs(), shared=st.booleans(), threads=st.integers(1, 3))
def test_every_dtype_stride_and_tie_is_staged_bit_for_bit(
    specs: list[TensorSpec], shared: bool, threads: int
) -> None:
    """Copies are contiguous, of equal shape and dtype, in the arena; what was one memory is one copy."""
    state = make_tensors(specs)
    local = collect(state)
    stager = DefaultStager(threads=threads)
    staged = stager.stage_local(local, shared=shared)
    staged.done.result(240)
    memory = torch.frombuffer(staged.arena.memory, dtype=torch.uint8)
    for number, (source, copy) in enumerate(zip(local.sources, staged.local.sources, strict=True)):
        assert (copy.shape, copy.dtype, copy.is_contiguous()) == (source.shape, source.dtype, True)
        assert not copy.requires_grad
        assert bits(copy) == bits(source)
        offset = int(staged.offsets[number])
        assert offset % 64 == 0
        assert bytes(memory[offset : offset + copy.nbytes].numpy().tobytes()) == bits(source)
        if copy.numel():
            assert copy.data_ptr() == memory.data_ptr() + offset
            assert copy.untyped_storage().nbytes() == copy.nbytes
    for number, spec in enumerate(specs):
        if spec.memory == "tied" and number and not state[f"layer.{number}"].is_conj():
            assert staged.offsets[number] == staged.offsets[number - 1]
    staged.release()
    stager.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_tensors_are_cut_over_threads(threads: int) -> None:
    """Each byte is copied by one thread: of tensors larger than a share, odd ones, and small ones between."""
    state = {}
    for number, size in enumerate((21 * MIB + 3, 1, 130_000, 9 * MIB, 7, 200_001)):
        state[f"t{number}"] = torch.arange(size, dtype=torch.int64).mul_(number + 7).to(torch.uint8)
    state["transposed"] = torch.arange(3 * MIB, dtype=torch.int16).view(1024, -1).t()
    local = collect(state)
    stager = DefaultStager(threads=threads, guard="full")
    for _ in range(2):
        staged = stager.stage_local(local)
        staged.done.result(240)
        for source, copy in zip(local.sources, staged.local.sources, strict=True):
            assert torch.equal(source, copy)
        torch.frombuffer(staged.arena.memory, dtype=torch.uint8).zero_()
        staged.release()
    stager.close()


def test_views_of_one_memory_that_differ_are_copied_each() -> None:
    """Equal addresses alone are no tie: shape, dtype and strides count."""
    whole = torch.arange(16.0).reshape(4, 4)
    state = {
        "whole": whole,
        "t": whole.t(),
        "head": whole[0],
        "bits": whole.view(torch.int32),
        "again": whole,
    }
    stager = DefaultStager()
    staged = stager.stage_local(collect(state))
    staged.done.result(240)
    assert torch.equal(staged.local.sources[1], whole.t())
    assert torch.equal(staged.local.sources[2], whole[0])
    assert torch.equal(staged.local.sources[3], whole.view(torch.int32))
    assert len(set(staged.offsets.tolist())) == 4
    assert staged.offsets[0] == staged.offsets[4]
    stager.close()


def test_the_share_of_cores_is_that_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host do not take each other's cores; a setting that is no number is ignored."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = default_threads()
    assert 1 <= alone <= 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert default_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert default_threads() == alone


def test_an_error_of_one_thread_is_raised_after_all_have_ended() -> None:
    """No thread still writes to the memory when the caller learns that the staging failed."""
    state = {"large": torch.ones(40 * MIB, dtype=torch.uint8), "small": torch.ones(3)}
    local = collect(state)
    stager = DefaultStager(threads=2)
    stager._copier.host.close()
    staged_error = stager.stage_local(local).done.exception(240)
    assert isinstance(staged_error, RuntimeError)
    with stager.lock(1.0):
        state["small"].add_(1)
    stager.close()


def resident_bytes(arena: HostArena) -> int:
    """How much of an arena has pages. By page: a line of smaps may be of what lies beside it, too."""
    page_bytes = mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(arena.address // page_bytes * 8)
        entries = np.frombuffer(pages.read(arena.size_bytes // page_bytes * 8), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(62))) * page_bytes


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_pages_of_a_new_arena_are_there_before_the_copy(kind: ArenaKind) -> None:
    """All at once, by several threads: a page fault each would double the time of a first copy. A mapping
    that was made again is new again."""
    arena, copier = HostArena(kind), HostCopier(3)
    for size_bytes in (50 * MIB, 90 * MIB):
        arena.reserve(size_bytes)
        assert arena.is_new and resident_bytes(arena) < size_bytes
        copier.populate(arena)
        assert not arena.is_new and resident_bytes(arena) == arena.size_bytes
    arena.reserve(MIB)
    assert not arena.is_new
    copier.close()
    arena.close()


def test_a_new_arena_is_populated_once_by_a_stager(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first save; where the memory is not to be had that save fails, and the next one tries again."""
    calls: list[int] = []
    populate = HostArena.populate

    def refused_once(arena: HostArena, offset: int, size_bytes: int) -> None:
        calls.append(offset)
        if len(calls) == 1:
            raise StagingMemoryError("there is none", needed_bytes=1)
        populate(arena, offset, size_bytes)

    monkeypatch.setattr(HostArena, "populate", refused_once)
    state = {"weight": torch.arange(3 * MIB)}
    local = collect(state)
    stager = DefaultStager(threads=1)
    failed = stager.stage_local(local)
    assert isinstance(failed.done.exception(SECONDS), StagingMemoryError)
    failed.release()
    for _ in range(2):
        staged = stager.stage_local(local)
        staged.done.result(SECONDS)
        assert torch.equal(staged.local.sources[0], state["weight"])
        staged.release()
    stager.close()
    assert calls == [0, 0, 8 * MIB, 16 * MIB]


def test_a_thread_that_is_held_up_leaves_its_shares_to_the_others() -> None:
    """A core that something else wants does not make the training wait for it."""
    copier, done = HostCopier(2), threading.Event()
    taken: list[int] = []

    def held_up() -> None:
        assert done.wait(SECONDS)

    def share(number: int) -> None:
        taken.append(number)
        if number == 15:
            done.set()

    copier._run([held_up, *(partial(share, number) for number in range(1, 16))])
    assert taken == list(range(1, 16))
    copier.close()


def test_a_share_that_fails_ends_the_copy() -> None:
    """What is left is not begun; its error is the copy's, from whichever thread."""
    copier, taken = HostCopier(2), list[int]()

    def share(number: int) -> None:
        taken.append(number)
        if number == 3:
            raise IndexError("out of range")

    with pytest.raises(IndexError, match="out of range"):
        copier._run([partial(share, number) for number in range(10_000)])
    assert len(taken) < 10_000
    copier._run([partial(share, 4)])
    copier.close()
