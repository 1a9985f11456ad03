"""Asynchronous saves that are interrupted, forked, dropped, or given stagers that use their memory again."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import textwrap
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager

import dcp
from dcp.background.session import AsyncSession
from dcp.progress import Progress
from dcp.saving.options import SaveOptions
from dcp.staging import BlockingAsyncStager, DefaultStager
from dcp.state_dict_saver import AsyncCheckpointerType
from dcp.storage.stores import PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore
from tests.support.crashes import in_lab
from tests.support.gates import FileGate, open_gated
from tests.support.programs import run_program
from tests.support.ranks import run_ranks

BOTH = [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]


def delayed(path: str, seconds: float) -> FaultInjectingStore:
    """A store in which each write of bytes takes that long."""
    return FaultInjectingStore(PosixStore(path), Fault("write", onwards=True, delay_seconds=seconds))


def slow_writer(path: Path, seconds: float = 0.4) -> dcp.FileSystemWriter:
    """Saves to ``path``, slowly."""
    return dcp.FileSystemWriter(path, open_store=partial(delayed, seconds=seconds))


def loaded(path: Path) -> dict[str, Any]:
    """What `state_of` made."""
    state = state_of(-1)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def state_of(version: int) -> dict[str, Any]:
    """A tensor and a number that say the version."""
    return {"w": torch.full((1000,), float(version)), "version": version}


# -- other folders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_a_relative_id_is_of_the_folder_where_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: AsyncCheckpointerType
) -> None:
    """A save that has to wait for the one before goes where a relative id was when it was asked for, though
    the program has gone to another folder since; and its metadata is read from there."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    options: dict[str, Any] = {"no_dist": True, "async_checkpointer_type": kind}
    dcp.async_save(state_of(1), storage_writer=slow_writer(tmp_path / "first", 0.5), **options)
    second = dcp.async_save(state_of(2), checkpoint_id="second", **options)
    monkeypatch.chdir(there)
    assert set(second.result(240).state_dict_metadata) == {"w", "version"}
    assert loaded(here / "second")["version"] == 2
    assert not list(there.iterdir())


# -- interrupts ----------------------------------------------------------------------------------------------


class Raising:
    """A `Stateful` whose state cannot be asked for."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        """Raise."""
        raise self._error("asked for the state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_a_script_interrupted_while_staging_ends(tmp_path: Path, kind: str) -> None:
    """Ctrl-C in async_save is raised there, and neither later saves nor the end of the script wait for it."""
    script = textwrap.dedent(
        """
        import sys, torch, dcp
        from dcp.state_dict_saver import AsyncCheckpointerType
        class Interrupted:
            def state_dict(self):
                raise KeyboardInterrupt
            def load_state_dict(self, state_dict):
                pass
        save = lambda name, state: dcp.async_save(state, checkpoint_id=f"{sys.argv[1]}/{name}", no_dist=True,
                                                  async_checkpointer_type=AsyncCheckpointerType[sys.argv[2]])
        try:
            save("a", {"s": Interrupted()})
        except KeyboardInterrupt:
            futures = [save(str(number), {"w": torch.ones(3)}) for number in range(3)]
            assert all(future.result(240) for future in futures)
        else:
            raise SystemExit("was not interrupted")
        """
    )
    ended = run_program("-c", script, tmp_path, kind, finalizes=True)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.parent.name for path in tmp_path.glob("*/manifest.msgpack")) == ["0", "1", "2"]


class InterruptedStore:
    """What opens a store; it is interrupted on its way to the writer process, once."""

    def __init__(self, interrupted: bool = False) -> None:
        self._interrupted = interrupted

    def __call__(self, path: str | os.PathLike[str]) -> PosixStore:
        """The store."""
        return PosixStore(path)

    def __reduce__(self) -> tuple[type[InterruptedStore], tuple[bool]]:
        if not self._interrupted:
            self._interrupted = True
            signal.raise_signal(signal.SIGINT)
        return InterruptedStore, (True,)


def test_an_interrupt_while_a_save_is_handed_over_comes_after_that(tmp_path: Path) -> None:
    """Half of a message to the writer process would leave this save, and all after it, without an end."""
    session = AsyncSession(no_dist=True, kind=AsyncCheckpointerType.PROCESS, timeout_seconds=240)
    writer = dcp.FileSystemWriter(tmp_path / "1", open_store=InterruptedStore())
    with pytest.raises(KeyboardInterrupt):
        session.save(state_of(1), storage_writer=writer)
    session.save(state_of(2), storage_writer=dcp.FileSystemWriter(tmp_path / "2")).result(240)
    session.close()
    assert [loaded(tmp_path / name)["version"] for name in ("1", "2")] == [1, 2]


def raise_on_one_rank(rank: int, world_size: int, root: Path, error: type[BaseException]) -> str:
    """How a save ends whose state one rank cannot get; then one more."""
    session = AsyncSession(timeout_seconds=240)
    state = {**state_of(1), "s": Raising(error)} if rank == 1 else state_of(1)
    try:
        future = session.save(state, storage_writer=dcp.FileSystemWriter(root / "bad"))
        ended = type(future.exception(240)).__mro__[1].__name__ + str(future.exception())
    except KeyboardInterrupt:
        ended = "interrupted"
    session.save(state_of(2), storage_writer=dcp.FileSystemWriter(root / "good")).result(240)
    session.close()
    return ended


def test_a_rank_that_cannot_give_its_state_tells_the_others(tmp_path: Path) -> None:
    """Whatever a `state_dict()` raises on one rank, the others do not wait for it, and learn what it was."""
    failed = run_ranks(2, raise_on_one_rank, tmp_path, RuntimeError)
    assert all(ended.startswith("RankFailedError") and "asked for the state" in ended for ended in failed)
    other, interrupted = run_ranks(2, raise_on_one_rank, tmp_path, KeyboardInterrupt)
    assert interrupted == "interrupted"
    assert "staging was ended by a KeyboardInterrupt (failed on rank 1" in other


# -- forks ---------------------------------------------------------------------------------------------------


def save_in_fork(root: Path, kind: AsyncCheckpointerType) -> None:
    """A fork's own save."""
    dcp.async_save(
        state_of(3), checkpoint_id=root / "fork", no_dist=True, async_checkpointer_type=kind
    ).result(240)


def fork_while_saving(root: Path, kind: AsyncCheckpointerType) -> list[Any]:
    """Exit codes of forks, one that does nothing and one that saves, and whether the first outlasted the
    save under way."""
    save = partial(dcp.async_save, no_dist=True, async_checkpointer_type=kind)
    save(state_of(1), checkpoint_id=root / "first").result(240)
    gate = FileGate(root / "gate")
    held = dcp.FileSystemWriter(root / "second", open_store=partial(open_gated, gate=gate))
    future = save(state_of(2), storage_writer=held)
    context = multiprocessing.get_context("fork")
    idle = context.Process(target=int)
    idle.start()
    idle.join(240)
    results = [idle.exitcode, future.done()]
    saving = context.Process(target=save_in_fork, args=(root, kind))
    saving.start()
    saving.join(240)
    results.append(saving.exitcode)
    gate.open()
    future.result(240)
    save(state_of(4), checkpoint_id=root / "last").result(240)
    return results


@pytest.mark.parametrize("kind", BOTH)
def test_forks_leave_the_saves_to_their_parent(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    """A data loader's worker ends at once, disturbs nothing, and may save by itself."""
    assert in_lab(fork_while_saving, tmp_path, kind) == [0, False, 0]
    assert [loaded(tmp_path / name)["version"] for name in ("first", "second", "fork", "last")] == [
        1,
        2,
        3,
        4,
    ]


def use_session_in_fork(root: Path) -> tuple[bytes, int]:
    """What a fork is told that uses its parent's session."""
    session = AsyncSession(no_dist=True, timeout_seconds=240)
    gate = FileGate(root / "gate")
    held = dcp.FileSystemWriter(root / "x", open_store=partial(open_gated, gate=gate))
    session.save(state_of(1), storage_writer=held)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            session.save(state_of(2), storage_writer=dcp.FileSystemWriter(root / "y"))
        except dcp.CheckpointError as error:
            os.write(writing, str(error).encode())
        session.close()
        os._exit(7 if session.wait(1) else 8)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    told = os.read(reading, 1000)
    gate.open()
    session.close()
    return told, code


def test_a_session_is_closed_to_forks(tmp_path: Path) -> None:
    """Its threads are not there: saving says so, closing and waiting return."""
    told, code = in_lab(use_session_in_fork, tmp_path)
    assert b"forked" in told
    assert code == 7
    assert loaded(tmp_path / "x")["version"] == 1


# -- sessions that nobody closes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "early"),
    [
        (AsyncCheckpointerType.THREAD, False),
        (AsyncCheckpointerType.PROCESS, True),
        pytest.param(AsyncCheckpointerType.THREAD, True, marks=pytest.mark.exhaustive),
        pytest.param(AsyncCheckpointerType.PROCESS, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_dropped_session_ends(tmp_path: Path, kind: AsyncCheckpointerType, early: bool) -> None:
    """Without close it goes when its last save has ended, memory and writer with it."""
    session = AsyncSession(no_dist=True, kind=kind, timeout_seconds=240)
    dropped = weakref.ref(session)
    future = session.save(state_of(1), storage_writer=slow_writer(tmp_path / "x", 0.2))
    if not early:
        future.result(240)
    del session
    gc.collect()
    future.result(240)
    del future
    deadline = time.monotonic() + 120
    while dropped() is not None and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
    assert dropped() is None
    assert loaded(tmp_path / "x")["version"] == 1


# -- stagers of torch's protocol -----------------------------------------------------------------------------


class StepwisePlanner(dcp.DefaultSavePlanner):
    """Takes torch's protocol, and its time."""

    def create_local_plan(self) -> Any:
        """The default's."""
        time.sleep(0.3)
        return super().create_local_plan()


@pytest.mark.parametrize(
    ("make_stager", "planner"),
    [
        (DefaultStager, StepwisePlanner),
        (partial(BlockingAsyncStager, cache_staged_state_dict=True), StepwisePlanner),
        (partial(BlockingAsyncStager, cache_staged_state_dict=True), dcp.DefaultSavePlanner),
    ],
)
def test_a_stager_that_uses_its_memory_again_harms_no_save(
    tmp_path: Path, make_stager: Callable[[], AsyncStager], planner: type[dcp.DefaultSavePlanner]
) -> None:
    """Two saves under way by one stager that has memory for one: each is its own snapshot."""
    stager = make_stager()
    futures = []
    for version in (1, 2, 3):
        state = state_of(version)
        futures.append(
            dcp.async_save(
                state,
                storage_writer=slow_writer(tmp_path / str(version), 0.1),
                planner=planner(),
                async_stager=stager,
                no_dist=True,
            )
        )
        state["w"].zero_()
    for version, future in enumerate(futures, start=1):
        future.result(240)
        assert loaded(tmp_path / str(version))["w"].eq(version).all()


def test_saves_begun_in_inference_mode_and_outside_of_it(tmp_path: Path) -> None:
    """Host memory first used in inference mode takes the next state, too."""
    for version, mode in enumerate([True, False, True, False]):
        with torch.inference_mode(mode):
            future = dcp.async_save(state_of(version), checkpoint_id=tmp_path / str(version), no_dist=True)
        future.result(240)
        assert loaded(tmp_path / str(version))["version"] == version


# -- what a script may set or pass ---------------------------------------------------------------------------


def leave(progress: Progress) -> None:
    """A progress callback that ends the program."""
    raise SystemExit(progress.phase)


@pytest.mark.parametrize("kind", BOTH)
def test_a_failing_progress_callback_harms_no_save(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    """The checkpoint is more than its progress bar; not even SystemExit ends a thread of the session."""
    session = AsyncSession(no_dist=True, kind=kind, timeout_seconds=240)
    for version in (1, 2):
        writer = dcp.FileSystemWriter(tmp_path / str(version))
        session.save(state_of(version), storage_writer=writer, options=SaveOptions(progress=leave)).result(
            240
        )
        assert loaded(tmp_path / str(version))["version"] == version
    session.close()


def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    """By async_save as by save."""
    state = {"w": torch.ones(3), "hooks": {"scale": lambda loss: loss * 2}}
    with pytest.raises(dcp.errors.PlanError, match=r"'hooks\.scale', a function, cannot be stored"):
        dcp.async_save(state, checkpoint_id=tmp_path / "x", no_dist=True).result(240)
    with pytest.raises(dcp.errors.PlanError, match=r"'hooks\.scale', a function, cannot be stored"):
        dcp.save(state, checkpoint_id=tmp_path / "y", no_dist=True)


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, StepwisePlanner])
def test_a_default_device_is_not_where_copies_are_made(
    tmp_path: Path, planner: type[dcp.DefaultSavePlanner]
) -> None:
    """Scripts set one for their models. Host buffers are read and written by address."""
    state = {
        "w": torch.arange(1 << 18).view(512, 512).t(),
        "none": torch.zeros(0),
        "conj": torch.full((3,), 1j),
    }
    state["conj"] = state["conj"].conj()
    read = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
    with torch.device("meta"):
        dcp.save(state, checkpoint_id=tmp_path / "sync", no_dist=True, planner=planner())
        dcp.async_save(state, checkpoint_id=tmp_path / "async", no_dist=True, planner=planner()).result(240)
        for name in ("sync", "async"):
            dcp.load(read, checkpoint_id=tmp_path / name, no_dist=True)
            assert all(read[name].equal(state[name].resolve_conj()) for name in state)


def save_by_a_subgroup(rank: int, world_size: int, root: Path) -> str:
    """What a rank sees that saves with a group which it is no member of, and the group's only member."""
    group = dist.new_group([1])
    try:
        dcp.async_save(state_of(1), checkpoint_id=root / "x", process_group=group).result(240)
    except dcp.CheckpointError as error:
        return str(error)
    return "saved"


def test_only_members_of_a_group_save_with_it(tmp_path: Path) -> None:
    """Others are told so."""
    other, member = run_ranks(2, save_by_a_subgroup, tmp_path)
    assert "not a member" in other
    assert member == "saved"


# -- the training's own store --------------------------------------------------------------------------------


def wait_for_a_key_while_saving(rank: int, world_size: int, root: Path) -> bool:
    """Rank 0 waits for a key, as new groups do, which rank 1 sets after its save has ended."""
    group = dist.group.WORLD
    assert group is not None
    first = group.get_group_store()
    port = 0 if rank == 0 else int(first.get("port"))
    store = dist.TCPStore(
        "127.0.0.1", port, None, is_master=rank == 0, timeout=timedelta(seconds=240), wait_for_workers=False
    )
    if rank == 0:
        first.set("port", str(store.port))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    state = {**state_of(1), "own": dcp.PerRank(torch.ones(100))}
    future = dcp.async_save(state, storage_writer=slow_writer(root / "x", 1.0 if rank else 0.0))
    if rank == 0:
        store.get("go")
    else:
        future.result(240)
        store.set("go", "1")
    return future.result(240) is not None


def test_a_save_goes_on_while_training_waits_for_its_store(tmp_path: Path) -> None:
    """A wait for a key occupies the training's connection to the store; the session has its own."""
    assert run_ranks(2, wait_for_a_key_while_saving, tmp_path) == [True, True]
