"""`SaveFuture.cancel`: a save ends without a trace, or its commit was first, the same on all ranks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.background.future import SaveFuture
from dcp.background.session import AsyncSession
from dcp.errors import SaveAbortedError
from dcp.progress import Progress
from dcp.ranks.failures import RankFailedError, failure_of
from dcp.saving.options import SaveOptions
from dcp.storage.stores import PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from tests.support.gates import FileGate, open_gated
from tests.support.ranks import run_ranks
from tests.support.versions import ABSENT, names_in, seen_by_dcp, version_state
from tests.support.writer_process import TIMEOUT_SECONDS, until_heard

LARGE = 1 << 18


class CancelAt:
    """A hook that has other threads cancel the save, and lets it go on when they have begun to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.future: SaveFuture | None = None
        self.begun = threading.Event()
        self.answers: list[bool] = []
        self._threads = ThreadPoolExecutor(2)

    def __call__(self, operation: Operation) -> None:
        """At the one operation."""
        if operation.number != self.number:
            return
        assert self.begun.wait(240)
        assert self.future is not None
        asked = [self._threads.submit(self.future.cancel) for _ in range(2)]
        for answer in asked:
            answer.add_done_callback(lambda answer: self.answers.append(answer.result()))
        assert self.future.abort_event.wait(240)

    def finish(self) -> list[bool]:
        """What both have been answered; [] if the save has no such operation."""
        self._threads.shutdown()
        return self.answers


def cancelled_at(session: AsyncSession, folder: Path, number: int, version: int) -> tuple[list[bool], bool]:
    """A save of ``version`` that is cancelled, twice, before its operation ``number``: the answers, and
    whether it was saved."""
    hook = CancelAt(number)
    fault = Fault(onwards=True, hook=hook)
    open_store = lambda path: FaultInjectingStore(PosixStore(path), fault)  # noqa: E731
    writer = dcp.FileSystemWriter(folder, sync_files=False, open_store=open_store)
    hook.future = session.save(version_state(version), storage_writer=writer)
    hook.begun.set()
    saved = hook.future.exception(240) is None
    return hook.finish(), saved


@pytest.mark.parametrize("old", [0, 1])
def test_at_every_operation_of_a_save_the_answer_is_true(tmp_path: Path, old: int) -> None:
    """Before each of its steps on storage, by two threads at once: True, and the folder is as it was before
    the save; or, once the commit has begun, False, and the new version is there."""
    session = AsyncSession(no_dist=True, timeout_seconds=240)
    seen: list[tuple[list[bool], bool]] = []
    number = 0
    while not seen or seen[-1][0]:
        number += 1
        folder = tmp_path / str(number)
        if old:
            writer = dcp.FileSystemWriter(folder, sync_files=False)
            dcp.save(version_state(old), storage_writer=writer, no_dist=True)
        before = names_in(folder)
        answers, saved = cancelled_at(session, folder, number, 2)
        seen.append((answers, saved))
        assert answers in ([], [True, True], [False, False])
        assert saved == (answers != [True, True])
        assert seen_by_dcp(folder) == (2 if saved else old or ABSENT)
        if not saved:
            assert names_in(folder) == before
            assert folder.exists() == bool(old)
    session.close()
    kinds = [saved for _, saved in seen]
    assert kinds == sorted(kinds), "once it is too late, it stays so"
    assert kinds.count(False) >= 4
    assert kinds.count(True) >= 2


def test_after_its_end_nothing_is_cancelled(tmp_path: Path) -> None:
    """A committed save stays, one that failed has failed, and neither counts as cancelled."""
    session = AsyncSession(no_dist=True, timeout_seconds=240)
    writer = dcp.FileSystemWriter(tmp_path / "x", sync_files=False)
    future = session.save(version_state(1), storage_writer=writer)
    future.result(240)
    assert (future.cancel(), future.cancel(), future.cancelled()) == (False, False, False)
    assert seen_by_dcp(tmp_path / "x") == 1
    (tmp_path / "file").touch()
    failing = session.save(
        version_state(1), storage_writer=dcp.FileSystemWriter(tmp_path / "file" / "x", sync_files=False)
    )
    assert isinstance(failing.exception(240), dcp.errors.StorageError)
    assert (failing.cancel(), failing.cancelled()) == (False, False)
    session.close()


def test_one_large_tensor_is_left_in_the_middle(tmp_path: Path) -> None:
    """A save need not first write the tensor that it is at, nor does a bar on the terminal keep it from
    ending."""
    first, going_on = threading.Event(), threading.Event()
    late: list[Operation] = []

    def slow(operation: Operation) -> None:
        first.set()
        assert going_on.wait(240)
        if future.abort_event.is_set():
            late.append(operation)

    fault = Fault("write", onwards=True, hook=slow)
    open_store = lambda path: FaultInjectingStore(PosixStore(path), fault)  # noqa: E731
    session = AsyncSession(no_dist=True, timeout_seconds=240)
    writer = dcp.FileSystemWriter(tmp_path / "x", sync_files=False, open_store=open_store)
    future = session.save(
        {"large": torch.ones(64 << 20, dtype=torch.uint8)},
        storage_writer=writer,
        options=SaveOptions(progress=True),
    )
    assert first.wait(240)
    future.abort()
    going_on.set()
    assert future.cancel()
    assert len(late) <= 2  # of 64
    assert not (tmp_path / "x").exists()
    session.close()


def test_a_progress_callback_is_told_that_it_would_wait_for_itself(tmp_path: Path) -> None:
    """cancel() there is refused; abort() ends the save."""
    refused: list[str] = []
    made: list[SaveFuture] = []
    known = threading.Event()

    def progress(_: Progress) -> None:
        assert known.wait(240)
        try:
            made[0].cancel()
        except dcp.CheckpointError as error:
            refused.append(str(error))
        made[0].abort()

    session = AsyncSession(no_dist=True, timeout_seconds=240)
    writer = dcp.FileSystemWriter(tmp_path / "x", sync_files=False)
    options = SaveOptions(progress=progress)
    made.append(session.save(version_state(1, large=LARGE), storage_writer=writer, options=options))
    known.set()
    assert isinstance(made[0].exception(240), SaveAbortedError)
    assert refused
    assert "wait for itself" in refused[0]
    session.close()


def test_the_writer_process_leaves_nothing(session: AsyncSession, tmp_path: Path) -> None:
    """Neither a save that is being written nor the one behind it; the next one is saved."""
    gate = FileGate(tmp_path / "gate")
    held = dcp.FileSystemWriter(tmp_path / "1", open_store=partial(open_gated, gate=gate))
    futures = [
        session.save(version_state(1, large=LARGE), storage_writer=held),
        session.save(version_state(2), storage_writer=dcp.FileSystemWriter(tmp_path / "2")),
    ]
    gate.wait_until_reached()
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(future.cancel) for future in futures]
        for future in futures:
            future.abort()  # as `cancel` does it, which may have begun or not
        until_heard(session)
        gate.open()
        assert [answer.result(TIMEOUT_SECONDS) for answer in answers] == [True, True]
    assert [future.cancelled() for future in futures] == [True, True]
    assert not (tmp_path / "1").exists()
    assert not (tmp_path / "2").exists()
    third = session.save(version_state(3), storage_writer=dcp.FileSystemWriter(tmp_path / "3"))
    third.result(TIMEOUT_SECONDS)
    assert (third.cancel(), seen_by_dcp(tmp_path / "3")) == (False, 3)


def cancel_by_the_rank_that_is_ready(rank: int, world_size: int, root: Path, kind: str) -> dict[str, Any]:
    """Rank 0 has written a fraction when rank 1, whose share is written, calls the save off."""
    written, called_off = root / f"written-{rank}", root / "called-off"
    open_store = partial(_slow, hook=_Writing(written, called_off if rank == 0 else None))
    session = AsyncSession(kind=dcp.AsyncCheckpointerType(kind), timeout_seconds=TIMEOUT_SECONDS)
    state = {
        f"rank{rank}.{number}": torch.full((1 << 18,), float(number)) for number in range(150 - 148 * rank)
    }
    writer = dcp.FileSystemWriter(root / "x", sync_files=False, open_store=open_store)
    future = session.save(state, storage_writer=writer)
    found: dict[str, Any] = {"answer": None}
    if rank == 1:
        for name, count in (("written-0", 3), ("written-1", 2)):
            _wait_for(root / name, count)
        called_off.touch()
        found["answer"] = future.cancel()
    error = future.exception(TIMEOUT_SECONDS)
    found |= {"error": isinstance(error, SaveAbortedError), "cancelled": future.cancelled()}
    found["soon"] = written.stat().st_size < 150
    found["left"] = (root / "x").exists()
    again = session.save(state, storage_writer=dcp.FileSystemWriter(root / "x", sync_files=False))
    again.result(TIMEOUT_SECONDS)
    found["late"] = again.cancel()
    session.close(TIMEOUT_SECONDS)
    return found


@dataclass(frozen=True)
class _Writing:
    """A hook that notes each write; from the third on it waits for a file, and takes its time."""

    notes: Path
    gate: Path | None

    def __call__(self, operation: Operation) -> None:
        with self.notes.open("ab") as file:
            file.write(b"x")
        if self.gate is not None and self.notes.stat().st_size >= 3:
            _wait_for(self.gate, 0)
            time.sleep(0.02)


def _wait_for(path: Path, size_bytes: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (path.exists() and path.stat().st_size >= size_bytes):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _slow(path: Any, hook: _Writing) -> FaultInjectingStore:
    return FaultInjectingStore(PosixStore(path), Fault("write", onwards=True, hook=hook))


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_any_rank_ends_the_writing_of_all(tmp_path: Path, kind: str) -> None:
    """A rank that is ready ends the save while another still writes, soon, and all ranks hold that it was
    cancelled; after a commit all are answered that it was not."""
    found = run_ranks(2, cancel_by_the_rank_that_is_ready, tmp_path, kind)
    alike = {"error": True, "cancelled": True, "soon": True, "left": False, "late": False}
    assert found == [alike | {"answer": None}, alike | {"answer": True}]


def test_who_called_it_off_is_named_and_not_who_was_told() -> None:
    """Whichever rank notices it first."""
    error = failure_of("write", {0: SaveAbortedError("the save was called off on rank 1", rank=1)}, 0, None)
    assert isinstance(error, RankFailedError) and isinstance(error, SaveAbortedError)
    assert error.ranks == [1]
