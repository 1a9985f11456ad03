"""`SaveFuture.cancel`: a save leaves nothing, or is committed because the commit had begun; ranks agree."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import SaveAbortedError, StorageError
from dcp.state_dict_saver import SaveFuture
from tests.support.background import FileGate, gated_writer, slow_writer
from tests.support.manager_runs import (
    Fault,
    FaultyWriter,
    Gate,
    Recorder,
    StoreCall,
    contents,
    manager_of,
    plain_writer,
    state_at,
    until,
    writer_with,
)
from tests.support.ranks import run_ranks
from tests.support.versions import ABSENT, names_in, save_version, seen_by_dcp, version_state

save = partial(dcp.async_save, no_dist=True)


class CancelAt:
    """A hook that lets two threads cancel the save at one operation, and continues once they have begun."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.future: SaveFuture | None = None
        self.begun = threading.Event()
        self.answers: list[bool] = []
        self._threads = ThreadPoolExecutor(2)

    def __call__(self, operation: StoreCall) -> None:
        """Cancel the save before operation ``number``."""
        if operation.number != self.number:
            return
        assert self.begun.wait(240)
        assert self.future is not None
        asked = [self._threads.submit(self.future.cancel) for _ in range(2)]
        for answer in asked:
            answer.add_done_callback(lambda answer: self.answers.append(answer.result()))
        assert self.future.abort_event.wait(240)

    def finish(self) -> list[bool]:
        """Return both answers of `cancel`; [] if the save had fewer operations."""
        self._threads.shutdown()
        return self.answers


def cancelled_at(folder: Path, number: int, version: int) -> tuple[list[bool], bool]:
    """Cancel a save twice before operation ``number``; return both answers, and whether it committed."""
    hook = CancelAt(number)
    writer = FaultyWriter([Fault(onwards=True, hook=hook)])(folder)
    hook.future = save(version_state(version), storage_writer=writer)
    hook.begun.set()
    saved = hook.future.exception(240) is None
    return hook.finish(), saved


@pytest.mark.parametrize("old", [0, 1])
def test_cancel_returns_the_truth_at_every_operation(tmp_path: Path, old: int) -> None:
    """`cancel` by two threads is True and the folder is unchanged, or False once the commit has begun."""
    seen: list[tuple[list[bool], bool]] = []
    number = 0
    while not seen or seen[-1][0]:
        number += 1
        folder = tmp_path / str(number)
        if old:
            save_version(folder, old, sync_files=False)
        before = names_in(folder)
        answers, saved = cancelled_at(folder, number, 2)
        seen.append((answers, saved))
        assert answers in ([], [True, True], [False, False]), number
        assert saved == (answers != [True, True]), number
        assert seen_by_dcp(folder) == (2 if saved else old or ABSENT), number
        if not saved:
            assert names_in(folder) == before and folder.exists() == bool(old), number
    kinds = [saved for _, saved in seen]
    assert kinds == sorted(kinds), "once it is too late, it stays so"
    assert kinds.count(False) >= 4 and kinds.count(True) >= 2


def test_cancel_after_the_end_has_no_effect(tmp_path: Path) -> None:
    """A committed save stays, a failed save stays failed, and neither counts as cancelled."""
    future = save(version_state(1), checkpoint_id=tmp_path / "x")
    future.result(240)
    assert (future.cancel(), future.cancel(), future.cancelled()) == (False, False, False)
    assert seen_by_dcp(tmp_path / "x") == 1
    (tmp_path / "file").touch()
    failing = save(version_state(1), checkpoint_id=tmp_path / "file" / "x")
    assert isinstance(failing.exception(240), StorageError)
    assert (failing.cancel(), failing.cancelled()) == (False, False)


def state_of_ranks(rank: int) -> dict[str, Any]:
    """Return a large state on rank 0 and a small state on rank 1."""
    return {f"r{rank}.{n}": torch.full((1 << 18,), float(n)) for n in range(150 - 148 * rank)}


def cancel_on_the_finished_rank(rank: int, world_size: int, root: Path, kind: str) -> list[Any]:
    """Cancel by rank 1, whose files are written, when rank 0 has hardly begun to write."""
    gate = FileGate(root / f"gate-{rank}")
    if rank == 1:
        gate.open()
    options: dict[str, Any] = {"async_checkpointer_type": dcp.AsyncCheckpointerType(kind)}
    writer = slow_writer(root / "x", 0.02) if rank == 0 else gated_writer(root / "x", gate, "write")
    future = dcp.async_save(state_of_ranks(rank), storage_writer=writer, **options)
    answer: bool | None = None
    if rank == 1:
        until(lambda: len(list(root.glob("x/*"))) >= 2, "the beginning of both ranks' files")
        gate.wait_until_reached()
        answer = future.cancel()
    error = future.exception(240)
    found = [answer, isinstance(error, SaveAbortedError), future.cancelled(), getattr(error, "ranks", None)]
    exists = (root / "x").exists()
    again = dcp.async_save(state_of_ranks(rank), checkpoint_id=root / "x", **options)
    again.result(240)
    return [*found, exists, again.cancel()]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_cancel_on_any_rank_ends_all_writes(tmp_path: Path, kind: str) -> None:
    """`cancel` on a rank that has finished writing ends the writes of all ranks; the error names the rank."""
    alike = [True, True, [1], False, False]
    found = run_ranks(2, cancel_on_the_finished_rank, tmp_path, kind)
    assert found == [[None, *alike], [True, *alike]]


def test_ctrl_c_in_a_sync_save_ends_a_cancel(tmp_path: Path) -> None:
    """Ctrl-C in a save with mode="sync" ends the wait of another thread in `cancel`."""

    def interrupt(_: object) -> None:
        answers.append(thread.submit(manager.cancel))
        time.sleep(0.5)  # until the thread waits in cancel()
        raise KeyboardInterrupt

    answers: list[Future[bool]] = []
    with ThreadPoolExecutor(1) as thread, manager_of(tmp_path, mode="sync", progress=interrupt) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.save(1, state_at(1))
        assert answers[0].result(60) is False


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_a_cancelled_save_is_not_a_failure(tmp_path: Path, on_failure: Any) -> None:
    """A cancelled save has its own event and is no failure; the older step stays, the next one is saved."""
    gate, seen = Gate(), Recorder()

    def writer(checkpoint_id: str) -> dcp.FileSystemWriter:
        return (writer_with(gate, "create", "*") if checkpoint_id[-1:] == "2" else plain_writer)(
            checkpoint_id
        )

    with manager_of(tmp_path, writer=writer, on_failure=on_failure, on_event=seen) as manager:
        assert not manager.cancel()
        manager.save(1, state_at(1))
        assert manager.wait(240)
        future = manager.save(2, state_at(2))
        gate.wait_until_reached()
        assert future is not None
        future.abort()  # cancel() does this too, but may not have begun when the gate is opened
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(manager.cancel)
            gate.open()
            answer.result(240)
        assert future.cancelled() and not manager.cancel()
        manager.save(3, state_at(3))
        assert manager.wait(240)
        assert (manager.all_steps(), manager.failures) == ([1, 3], 0)
    kinds = seen.kinds("saved", "save_failed", "save_cancelled")
    assert kinds == [("saved", 1), ("save_cancelled", 2), ("saved", 3)]
    assert contents(tmp_path).keys() == {1, 3}
