"""Saves by a writer process: the saved values, failures of the process, and its reuse."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import WriterProcessError
from dcp.state_dict_saver import SaveFuture
from dcp.storage.stores import PosixStore
from tests.support.background import FileGate, NotedPids, gated_writer, slow_writer
from tests.support.manager_runs import until
from tests.support.processes import lives
from tests.support.user_storage import ItemReader, ItemWriter, PlainLoadPlanner, PlainSavePlanner
from tests.support.values import leaves
from tests.support.versions import ABSENT, seen_by_dcp, version_state

LARGE = 1 << 18
PROCESS = dcp.AsyncCheckpointerType.PROCESS
by_process = partial(dcp.async_save, no_dist=True, async_checkpointer_type=PROCESS)


def overwrite(state: Any) -> None:
    """Overwrite every tensor, as the next training step does."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            value.zero_()


def save(folder: Path, version: int, **options: Any) -> SaveFuture:
    """Save one version, and overwrite its tensors at once."""
    state = version_state(version, large=LARGE)
    options.setdefault("storage_writer", dcp.FileSystemWriter(folder, sync_files=False))
    future = by_process(state, **options)
    overwrite(state)
    return future


def saved_by(pid: int, folder: Path, version: int) -> bool:
    """Return whether a save is right and the process ``pid`` alone wrote it."""
    noted = NotedPids(folder.with_name(f"{folder.name}-pids"))
    save(folder, version, storage_writer=noted.writer(folder)).result(240)
    return seen_by_dcp(folder, large=LARGE) == version and noted.others() == [pid]


@pytest.fixture
def writer(tmp_path: Path) -> int:
    """Return the process id of the writer process, which later tests use again."""
    noted = NotedPids(tmp_path / "pids")
    save(tmp_path / "first", 1, storage_writer=noted.writer(tmp_path / "first")).result(240)
    (pid,) = noted.others()
    return pid


def test_two_concurrent_saves_are_complete(tmp_path: Path, writer: int) -> None:
    """A save is staged and sent while another is written; both are right, and progress is reported."""
    gate = FileGate(tmp_path / "gate")
    reports: list[Any] = []
    futures = [
        save(tmp_path / "1", 1, storage_writer=gated_writer(tmp_path / "1", gate)),
        save(tmp_path / "2", 2, progress=reports.append),
    ]
    assert not futures[0].done()
    gate.open()
    for future in futures:
        future.result(240)
    assert [seen_by_dcp(tmp_path / name, large=LARGE) for name in ("1", "2")] == [1, 2]
    assert reports[-1].phase == "write"
    assert reports[-1].bytes_done == reports[-1].bytes_total > LARGE


class Negating(dcp.DefaultSavePlanner):
    """A save planner that overrides a step, as in torch's documentation."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Negate a tensor."""
        object = super().transform_object(write_item, object)
        return -object if isinstance(object, torch.Tensor) else object


def test_a_users_planner_and_storage_run_in_the_writer(tmp_path: Path, writer: int) -> None:
    """A user's planner and storage writer run in the writer process; the storage's metadata comes back."""
    state: dict[str, Any] = {"w": torch.arange(6.0), "step": 3}
    future = by_process(state, checkpoint_id=tmp_path / "dcp", planner=Negating())
    overwrite(state)
    future.result(240)
    assert dcp.read(tmp_path / "dcp")["w"].tolist() == (-torch.arange(6.0)).tolist()
    state = {"w": torch.arange(6.0), "step": 4, "vocabulary": os.urandom(3 << 20)}
    foreign = ItemWriter(tmp_path / "theirs")
    future = by_process(state, storage_writer=foreign, planner=PlainSavePlanner())
    overwrite(state)
    assert set(future.result(240).state_dict_metadata) == {"w", "step", "vocabulary"}
    assert foreign.calls == []
    got = {"w": torch.zeros(6), "step": 0, "vocabulary": b""}
    dcp.load(got, storage_reader=ItemReader(tmp_path / "theirs"), planner=PlainLoadPlanner(), no_dist=True)
    assert got["w"].tolist() == torch.arange(6.0).tolist() and got["vocabulary"] == state["vocabulary"]  # type: ignore[attr-defined]


def test_objects_that_cannot_be_sent_are_refused(tmp_path: Path, writer: int) -> None:
    """A planner class defined in a function or script, or a lambda as `open_store`, is refused with the
    remedy. The next save succeeds."""
    local = type("Local", (Negating,), {})
    script = type("Script", (Negating,), {"__module__": "__main__", "__qualname__": "Script"})
    by_lambda = dcp.FileSystemWriter(tmp_path / "x", open_store=lambda path: PosixStore(path))
    cases: list[dict[str, Any]] = [{"planner": local()}, {"planner": script()}, {"storage_writer": by_lambda}]
    for case in cases:
        with pytest.raises(WriterProcessError, match="top level of a module") as caught:
            save(tmp_path / "x", 1, **case).result(240)
        assert isinstance(caught.value, dcp.RankFailedError)
    assert seen_by_dcp(tmp_path / "x") == ABSENT
    assert saved_by(writer, tmp_path / "x", 2)


def test_signals_to_the_writer_stop_no_save(tmp_path: Path, writer: int) -> None:
    """SIGTERM, SIGINT and SIGHUP to the writer process stop neither the save under way nor a later one."""
    gate = FileGate(tmp_path / "gate")
    under_way = save(tmp_path / "1", 1, storage_writer=gated_writer(tmp_path / "1", gate))
    gate.wait_until_reached()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(writer, number)
    gate.open()
    under_way.result(240)
    assert saved_by(writer, tmp_path / "2", 2)


def test_a_cancelled_save_leaves_no_files(tmp_path: Path, writer: int) -> None:
    """After `cancel` no file is left, and the same writer process makes the next save."""
    state = {str(number): torch.ones(1 << 14) for number in range(60)}
    future = by_process(state, storage_writer=slow_writer(tmp_path / "1", 0.1))
    until(lambda: [*tmp_path.glob("1/*")], "the beginning of the save")
    assert future.cancel() and not (tmp_path / "1").exists()
    assert saved_by(writer, tmp_path / "2", 2)


def test_a_killed_writer_fails_one_save(tmp_path: Path, writer: int) -> None:
    """SIGKILL of the writer process fails the save that was not read yet; a committed save stays, and the
    next save starts a new process."""
    is_read = threading.Event()
    first = save(tmp_path / "1", 1, progress=lambda _: is_read.wait(60))
    until(lambda: (tmp_path / "1" / ".metadata").exists(), "its commit")
    time.sleep(1)  # its end has been sent
    os.kill(writer, signal.SIGSTOP)
    second = save(tmp_path / "2", 2)
    time.sleep(1)  # it has been sent, and is not read
    os.kill(writer, signal.SIGKILL)
    time.sleep(1)  # all its threads have ended
    is_read.set()
    first.result(240)
    with pytest.raises(WriterProcessError, match="rank 0 was killed by SIGKILL"):
        second.result(240)
    noted = NotedPids(tmp_path / "new-pids")
    save(tmp_path / "3", 3, storage_writer=noted.writer(tmp_path / "3")).result(240)
    assert not lives(writer) and noted.others() != [writer]
    assert [seen_by_dcp(tmp_path / name, large=LARGE) for name in ("1", "3")] == [1, 3]
