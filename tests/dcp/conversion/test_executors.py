"""Who carries the tasks out: processes of ours, a cluster of Dask, executors of others; and how they fail."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import dcp
from dcp.conversion.copying.executors import LocalProcesses
from dcp.conversion.run import convert
from dcp.progress import Progress
from dcp.storage.errors import CheckpointError, CorruptCheckpointError, PlanError
from tests.support.conversion import folder_of
from tests.support.crashes import Child, in_lab
from tests.support.dask_cluster import dask_cluster
from tests.support.processes import children, lives

_ELEMENTS = 5 << 20
_ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MiB: three tasks."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    dcp.save({"w": torch.arange(_ELEMENTS, dtype=torch.int32)}, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of 8 MiB, so that there are some."""
    monkeypatch.setattr("dcp.conversion.copying.tasks.TASK_BYTES", 8 << 20)


def _check(target: Path) -> None:
    loaded = torch.load(target, weights_only=True, mmap=True)["w"]
    assert torch.equal(loaded, torch.arange(_ELEMENTS, dtype=torch.int32))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """``host:port`` of a Dask scheduler with two worker processes."""
    with dask_cluster(threads=1) as made:
        yield made.scheduler_address.removeprefix("tcp://")


def test_a_dask_cluster_converts(cluster: str, source: Path, tmp_path: Path) -> None:
    """Both workers take tasks, and the result is what any executor makes."""
    report = convert(source, tmp_path / "model.pt", to="torch", executor=f"dask://{cluster}")
    _check(tmp_path / "model.pt")
    assert (report.tasks, report.tasks_resumed) == (3, 0)
    assert report.blocks_unverified == 0
    assert folder_of(tmp_path / "model.pt") == ["model.pt"]


@pytest.mark.exhaustive
def test_a_dask_cluster_converts_through_a_map(cluster: str, source: Path, tmp_path: Path) -> None:
    """What a task needs of the map travels with it."""
    weights = {"rules": [{"from": {"w": "(a two)"}, "to": {"w": "(two a)"}}], "sizes": {"two": 2}}
    convert(source, tmp_path / "model.pt", to="torch", executor=f"dask://{cluster}", map=weights)
    loaded = torch.load(tmp_path / "model.pt", weights_only=True, mmap=True)["w"]
    assert torch.equal(loaded, torch.arange(_ELEMENTS, dtype=torch.int32).view(-1, 2).T.reshape(-1))


def test_errors_come_back_from_dask(cluster: str, source: Path, tmp_path: Path) -> None:
    """A file that is gone is the same typed error as here."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in source.iterdir():
        if path.suffix != ".distcp":
            (broken / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        convert(broken, tmp_path / "model.pt", to="torch", executor=f"dask://{cluster}")
    assert not (tmp_path / "model.pt").exists()


def test_a_dask_cluster_merges(cluster: str, source: Path, tmp_path: Path) -> None:
    """Each worker opens all sources for itself; the bytes are those of any executor."""
    for number in range(2):
        torch.manual_seed(number)
        dcp.save({"w": torch.randn(2 << 20)}, checkpoint_id=tmp_path / str(number), no_dist=True)
    sources = [tmp_path / "0", tmp_path / "1"]
    dcp.merge(sources, tmp_path / "here.pt", weights=[0.3, -0.7], executor="inline")
    report = dcp.merge(sources, tmp_path / "there.pt", weights=[0.3, -0.7], executor=f"dask://{cluster}")
    assert report.tasks == 2
    here, there = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("here", "there"))
    assert torch.equal(here["w"], there["w"])


def test_processes_convert_and_tell_how_far_they_are(source: Path, tmp_path: Path) -> None:
    """Progress counts bytes up to all of them."""
    seen: list[Progress] = []
    report = convert(source, tmp_path / "model.pt", to="torch", workers=2, progress=seen.append)
    _check(tmp_path / "model.pt")
    assert seen[-1].bytes_done == seen[-1].bytes_total == report.bytes_written
    assert seen[-1].phase == "convert"


def test_an_executor_of_the_callers(source: Path, tmp_path: Path) -> None:
    """Its threads do the work, and it is not shut down."""
    with ThreadPoolExecutor(2) as pool:
        convert(source, tmp_path / "model.pt", to="torch", executor=pool)
        assert pool.submit(lambda: 5).result() == 5
    _check(tmp_path / "model.pt")


def test_workers_import_no_torch() -> None:
    """Nor the program of the caller: they start as modules of their own."""
    pool = LocalProcesses(1)
    try:
        found = pool.submit(eval, "list(__import__('sys').modules)").result(60)
    finally:
        pool.shutdown()
    assert "dcp.conversion.copying.worker" in found
    assert not {"torch", "pytest"} & set(found)


def test_a_worker_that_dies_is_an_error_and_is_replaced() -> None:
    """Its task fails with what happened; the next one gets a new process."""
    pool = LocalProcesses(1)
    try:
        with pytest.raises(CheckpointError, match="ended with exit code 7"):
            pool.submit(os._exit, 7).result(60)
        assert pool.submit(len, "abc").result(60) == 3
    finally:
        pool.shutdown()


def _shut_down_beside_a_fork() -> int:
    pool = LocalProcesses(1)
    found: int = pool.submit(len, "abc").result(60)
    with contextlib.ExitStack() as stack:
        fork = Child(time.sleep, 600)
        stack.callback(fork.wait)
        stack.callback(os.kill, fork.pid, signal.SIGKILL)
        ended = threading.Thread(target=pool.shutdown, daemon=True)
        ended.start()
        ended.join(60)
        assert not ended.is_alive()
    return found


def test_a_pool_ends_though_a_fork_holds_its_pipes() -> None:
    """Such as a data loader's worker, begun meanwhile, which lives for an epoch."""
    assert in_lab(_shut_down_beside_a_fork) == 3


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


_ENDLESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
from dcp.cli import main
from dcp.conversion import run
from dcp.conversion.copying import tasks
tasks.TASK_BYTES = 8 << 20
from tests.dcp.conversion import endless_task
run.run_batch = endless_task.run_batch
sys.argv = ["dcp", "convert", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_an_interrupted_conversion_ends_its_processes(
    number: signal.Signals, status: int, source: Path, tmp_path: Path
) -> None:
    """Whatever they are at, if only the command itself is told, and nothing stays that is of no use."""
    target = tmp_path / "model.pt"
    command = [sys.executable, "-c", _ENDLESS, str(source), str(target), "--to", "torch", "--workers", "2"]
    with subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        workers = {int(run.stderr.readline()) for _ in range(2)}
        assert workers <= set(children(run.pid))
        run.send_signal(number)
        assert run.wait(120) == status
        _wait_until(lambda: not any(map(lives, workers)))
        assert run.stderr.read() == ""
    assert number == signal.SIGKILL or folder_of(target) == []


def test_what_an_interrupted_conversion_has_done_stays(source: Path, tmp_path: Path) -> None:
    """Unless nothing could go on from it: then the space is free again."""

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "model.pt"
    for resume, left in ((False, 0), (True, 1)):
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, to="torch", executor="inline", resume=resume, progress=interrupt)
        assert len(folder_of(target)) == left
    assert convert(source, target, to="torch", executor="inline").tasks_resumed == 1
    _check(target)


def test_threads_of_a_pool_end_with_it() -> None:
    """Nothing is left running."""
    before = set(threading.enumerate())
    pool = LocalProcesses(2)
    assert pool.submit(len, "abc").result(60) == 3
    pool.shutdown()
    assert set(threading.enumerate()) <= before


def test_wrong_numbers_and_addresses(source: Path, tmp_path: Path) -> None:
    """Told before anything is written."""
    with pytest.raises(PlanError, match="workers must be positive"):
        convert(source, tmp_path / "model.pt", to="torch", workers=0)
    assert not (tmp_path / "model.pt").exists()
