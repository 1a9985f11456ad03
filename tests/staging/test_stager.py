"""Copies of a state while it is saved: memory of an unfinished save is kept, and a changing state refused."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from dcp.errors import StagingError
from dcp.staging import DefaultStager, StagedState, StagingTimeoutError
from tests.staging.sources import collect

MIB = 1 << 20


def finished(staged: StagedState) -> StagedState:
    """``staged`` once its copies are complete."""
    staged.done.result(240)
    return staged


def open_arenas() -> set[int]:
    """The inodes of the arenas that this process has open."""
    found = set()
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):
            if "dcp-staging" in str(path.readlink()):
                found.add(path.stat().st_ino)
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_fifty_stagings_keep_memory_and_descriptors_flat(shared: bool) -> None:
    """Arena, views and layout of the first staging serve all others; each holds the state of its moment."""
    gc.collect()
    others = open_arenas()  # what earlier tests have left may go meanwhile
    state = {f"layer.{number}": torch.zeros(30_000) for number in range(24)}
    stager, layouts, usage = DefaultStager(), set(), list[tuple[float, int]]()
    for step in range(50):
        for tensor in state.values():
            tensor.fill_(step)
        staged = finished(stager.stage_local(collect(state), shared=shared, overlap=step % 2 == 1))
        layouts.add((staged.layout, staged.arena.fd, staged.offsets.tobytes()))
        assert all(bool((copy == step).all()) for copy in staged.local.sources)
        assert staged.seconds["staging"] > 0
        staged.release()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        usage.append((pages * os.sysconf("SC_PAGESIZE") / MIB, len(open_arenas() - others)))
    assert len(layouts) == 1
    assert usage[-1][1] == usage[2][1] == int(shared)
    assert usage[-1][0] < usage[2][0] + 32
    stager.close()


def test_another_structure_gives_another_layout() -> None:
    """Growing, a changed dtype and a lost tie are staged right, under new numbers; the same one is kept."""
    stager = DefaultStager()
    one, two = torch.arange(5.0), torch.arange(6.0)
    states = [
        {"a": one, "b": two},
        {"a": one.clone(), "b": two + 1},
        {"a": one, "b": torch.arange(MIB)},
        {"a": one, "b": torch.arange(MIB).float()},
        {"a": one, "b": one},
        {"a": one, "b": one.clone()},
        {"a": one.view(5, 1), "b": one},
    ]
    layouts = []
    for state in states:
        local = collect(state)
        staged = finished(stager.stage_local(local))
        for source, copy in zip(local.sources, staged.local.sources, strict=True):
            assert (copy.dtype, copy.shape) == (source.dtype, source.shape)
            assert torch.equal(copy, source)
        layouts.append(staged.layout)
        staged.release()
    assert layouts[0] == layouts[1]
    assert len(set(layouts[1:])) == len(layouts) - 1
    stager.close()


def test_a_stager_with_one_arena_waits_for_the_save_before() -> None:
    """The memory of an unfinished save is not written to; the wait is bounded and the error says for what."""
    state = {"w": torch.ones(1000)}
    stager = DefaultStager()
    first = finished(stager.stage_local(collect(state)))
    state["w"].fill_(2)
    with pytest.raises(StagingTimeoutError, match="more arenas") as caught:
        stager.stage_local(collect(state), timeout_seconds=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, StagingError)
    timer = threading.Timer(0.05, first.release)
    timer.start()
    assert bool((first.local.sources[0] == 1).all())
    second = finished(stager.stage_local(collect(state), timeout_seconds=240))
    timer.join()
    first.release()
    with pytest.raises(StagingTimeoutError):
        stager.stage_local(collect(state), timeout_seconds=0.01)
    second.release()
    stager.close()


def test_two_arenas_hold_two_saves() -> None:
    """With arenas=2 a second save is staged while the first is being written, a third is not; another stager
    has memory and a lock of its own."""
    state, stager, other = {"w": torch.ones(1000)}, DefaultStager(arenas=2), DefaultStager()
    staged = []
    for step in range(2):
        state["w"].fill_(step)
        staged.append(finished(stager.stage_local(collect(state))))
    assert [copy.local.sources[0][5].item() for copy in staged] == [0, 1]
    assert staged[0].layout != staged[1].layout
    with pytest.raises(StagingTimeoutError):
        stager.stage_local(collect(state), timeout_seconds=0.01)
    with stager.lock():
        finished(other.stage_local(collect(state), timeout_seconds=240)).release()
    staged[0].release()
    assert finished(stager.stage_local(collect(state))).layout == staged[0].layout
    stager.close()
    other.close()


def test_lock_entered_after_an_overlapped_staging_waits_for_its_copies() -> None:
    """A state changed inside of lock(), right after stage_local returned, is staged as it was before."""
    state = {f"w{number}": torch.zeros(MIB) for number in range(4)}
    stager = DefaultStager(guard="full")
    for step in range(20):
        staged = stager.stage_local(collect(state), overlap=True)
        with stager.lock():
            assert staged.done.done() or staged.seconds
            for tensor in state.values():
                tensor.add_(1)
        finished(staged)
        assert all(bool((copy == step).all()) for copy in staged.local.sources)
        staged.release()
    stager.close()


def test_a_staging_waits_until_the_lock_is_left() -> None:
    """While another thread changes the state nothing is copied; the copy has the whole change."""
    state = {"a": torch.zeros(10), "b": torch.zeros(10)}
    stager = DefaultStager()
    inside, go_on = threading.Event(), threading.Event()

    def change() -> None:
        with stager.lock():
            state["a"].fill_(1)
            inside.set()
            go_on.wait(240)
            state["b"].fill_(1)

    changer = threading.Thread(target=change)
    changer.start()
    assert inside.wait(240)
    with pytest.raises(StagingTimeoutError, match="optimizer"):
        stager.stage_local(collect(state), timeout_seconds=0.05)
    threading.Timer(0.05, go_on.set).start()
    staged = finished(stager.stage_local(collect(state)))
    assert [copy.tolist() for copy in staged.local.sources] == [[1.0] * 10] * 2
    changer.join()
    stager.close()


def test_a_save_begun_inside_of_its_own_lock_is_an_error() -> None:
    """It would wait for itself; the memory it had taken is free again."""
    stager = DefaultStager()
    local = collect({"w": torch.ones(3)})
    with stager.lock(), pytest.raises(StagingError, match="inside of lock"):
        stager.stage_local(local)
    finished(stager.stage_local(local, timeout_seconds=240)).release()
    stager.close()


def test_a_change_while_staging_overlaps_is_an_error_that_names_the_tensor() -> None:
    """Who forgets lock() gets no torn checkpoint, and the next staging is good again."""
    state = {"kept": torch.zeros(5000), "changed": torch.zeros(5000), "step": torch.tensor(3)}
    stager, go_on, held = DefaultStager(arenas=2), threading.Event(), threading.Event()

    def hold(_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            held.set()
            go_on.wait(240)

    while not held.is_set():  # a copy may be complete before its future is asked to call
        before = stager.stage_local(collect({"filler": torch.ones(16 * MIB)}), overlap=True)
        before.done.add_done_callback(hold)
        before.release()
        held.wait(1)
    staged = stager.stage_local(collect(state), overlap=True)
    state["changed"].add_(1)
    go_on.set()
    error = staged.done.exception(240)
    staged.release()
    assert isinstance(error, StagingError)
    assert (error.fqns, error.count) == (["changed"], 1)
    finished(stager.stage_local(collect(state))).release()
    stager.close()


def test_memory_is_not_given_away_while_it_is_copied_to() -> None:
    """A save that ends before its staging does gives the arena back only then."""
    stager, state = DefaultStager(), {"w": torch.ones(16 * MIB, dtype=torch.uint8)}
    for step in range(3):
        state["w"].fill_(step)
        staged = stager.stage_local(collect(state), overlap=True)
        staged.release()
        following = stager.stage_local(collect(state), overlap=False)
        assert staged.done.done()
        assert bool((following.local.sources[0] == step).all())
        following.release()
    stager.close()


def test_closing_with_live_views_and_unfinished_saves() -> None:
    """Views stay valid after close(), which is idempotent; a closed stager stages nothing."""
    stager = DefaultStager(process=True)
    staged = stager.stage_local(collect({"w": torch.arange(1000.0)}), overlap=True)
    stager.close()
    stager.close()
    assert staged.done.done()
    assert torch.equal(staged.local.sources[0], torch.arange(1000.0))
    assert staged.arena.fd is not None
    staged.release()
    assert staged.arena.fd is None
    assert torch.equal(staged.local.sources[0], torch.arange(1000.0))
    with pytest.raises(StagingError, match="closed"):
        stager.stage_local(collect({"w": torch.ones(1)}))
    with pytest.raises(StagingError, match="closed"):
        stager.stage({"w": torch.ones(1)})


def test_a_state_that_does_not_fit_into_memory_is_refused_and_the_next_one_staged() -> None:
    """The error is raised by stage_local; nothing stays taken or locked."""
    stager = DefaultStager()
    small = torch.zeros(1)
    huge = collect({"w": small.expand(1 << 48)})
    with pytest.raises(MemoryError):
        stager.stage_local(huge)
    with stager.lock(1.0):
        small.fill_(1)
    assert (
        finished(stager.stage_local(collect({"w": small}), timeout_seconds=240)).local.sources[0].item() == 1
    )
    stager.close()


def test_the_kind_of_memory_follows_the_writer() -> None:
    """Shared for a writer process, private otherwise; a stager that changes keeps one arena only."""
    stager = DefaultStager()
    local = collect({"w": torch.ones(10)})
    kinds = []
    for shared in (False, True, False):
        staged = finished(stager.stage_local(local, shared=shared))
        kinds.append((staged.arena.kind, staged.arena.fd is not None))
        staged.release()
    assert kinds == [("private", False), ("shared", True), ("private", False)]
    stager.close()
    for_process = DefaultStager(process=True)
    assert finished(for_process.stage_local(local)).arena.kind == "shared"
    for_process.close()


def test_an_empty_state_is_staged() -> None:
    """No tensors, or only empty ones, are no special case."""
    stager = DefaultStager()
    for state in ({}, {"step": 3}, {"none": torch.empty(0, 5)}):
        staged = finished(stager.stage_local(collect(state)))
        assert [tuple(copy.shape) for copy in staged.local.sources] == [(0, 5)] * ("none" in state)
        staged.release()
    stager.close()
