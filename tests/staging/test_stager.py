"""The stager: memory of an unfinished save is not reused, and a change during a copy is refused."""

from __future__ import annotations

import threading

import pytest
import torch

from dcp.errors import StagingError
from dcp.staging import DefaultStager, StagedState, StagingTimeoutError
from tests.staging.sources import collect

MIB = 1 << 20


def finished(staged: StagedState) -> StagedState:
    """Wait for the copies of ``staged``, and return it."""
    staged.done.result(240)
    return staged


def test_one_arena_waits_for_the_previous_save() -> None:
    """Memory of an unfinished save is not overwritten; the error of the timeout suggests more arenas."""
    state = {"w": torch.ones(1000)}
    stager = DefaultStager()
    first = finished(stager.stage_local(collect(state)))
    state["w"].fill_(2)
    with pytest.raises(StagingTimeoutError, match="increase arenas=") as caught:
        stager.stage_local(collect(state), timeout_seconds=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, StagingError)
    timer = threading.Timer(0.05, first.release)
    timer.start()
    assert bool((first.local.memory.tensors[0] == 1).all())
    second = finished(stager.stage_local(collect(state), timeout_seconds=240))
    timer.join()
    first.release()
    with pytest.raises(StagingTimeoutError):
        stager.stage_local(collect(state), timeout_seconds=0.01)
    second.release()
    stager.close()


def test_lock_after_overlapped_staging_waits_for_copies() -> None:
    """A change inside of lock() right after stage_local(overlap=True) is not in the copy."""
    state = {f"w{number}": torch.zeros(MIB) for number in range(4)}
    stager = DefaultStager(guard="full")
    for step in range(20):
        staged = stager.stage_local(collect(state), overlap=True)
        with stager.lock():
            assert staged.done.done() or staged.seconds
            for tensor in state.values():
                tensor.add_(1)
        finished(staged)
        assert all(bool((copy == step).all()) for copy in staged.local.memory.tensors)
        staged.release()
    stager.close()


def test_a_staging_waits_until_the_lock_is_left() -> None:
    """No copy begins while another thread holds lock(); the copy has that thread's whole change."""
    state = {"a": torch.zeros(10), "b": torch.zeros(10)}
    stager = DefaultStager()
    inside, proceed = threading.Event(), threading.Event()

    def change() -> None:
        with stager.lock():
            state["a"].fill_(1)
            inside.set()
            proceed.wait(240)
            state["b"].fill_(1)

    changer = threading.Thread(target=change)
    changer.start()
    assert inside.wait(240)
    with pytest.raises(StagingTimeoutError, match="optimizer"):
        stager.stage_local(collect(state), timeout_seconds=0.05)
    threading.Timer(0.05, proceed.set).start()
    staged = finished(stager.stage_local(collect(state)))
    assert [copy.tolist() for copy in staged.local.memory.tensors] == [[1.0] * 10] * 2
    changer.join()
    stager.close()


def test_a_save_inside_its_own_lock_is_an_error() -> None:
    """A save inside of its own lock() would deadlock, so it raises and releases its memory."""
    stager = DefaultStager()
    local = collect({"w": torch.ones(3)})
    with stager.lock(), pytest.raises(StagingError, match="inside of lock"):
        stager.stage_local(local)
    finished(stager.stage_local(local, timeout_seconds=240)).release()
    stager.close()


def test_a_change_during_overlapped_staging_is_an_error() -> None:
    """A change without lock() during an overlapped copy fails the save, and the next staging succeeds."""
    state = {"kept": torch.zeros(5000), "changed": torch.zeros(5000), "step": torch.tensor(3)}
    stager, proceed, held = DefaultStager(arenas=2), threading.Event(), threading.Event()

    def hold(_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            held.set()
            proceed.wait(240)

    while not held.is_set():  # a copy may complete before the callback is added to its future
        before = stager.stage_local(collect({"filler": torch.ones(8 * MIB)}), overlap=True)
        before.done.add_done_callback(hold)
        before.release()
        held.wait(1)
    staged = stager.stage_local(collect(state), overlap=True)
    state["changed"].add_(1)
    proceed.set()
    error = staged.done.exception(240)
    staged.release()
    assert isinstance(error, StagingError)
    assert (error.fqns, error.count) == (["changed"], 1)
    finished(stager.stage_local(collect(state))).release()
    stager.close()
