"""Tasks on a real Dask cluster of two processes: done, watched, cancelled, and done again when one dies."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import pytest

from dcp.server.database.engine import Database
from dcp.server.jobs.executors import dask
from dcp.server.jobs.executors.dask import DaskExecutor
from dcp.server.jobs.executors.executor import Running
from dcp.server.jobs.executors.subprocess_main import Setup
from dcp.server.jobs.executors.subprocess_messages import Order
from dcp.server.jobs.executors.subprocesses import ProcessOutcome
from dcp.server.settings import Settings
from tests.support.dask_cluster import dask_cluster
from tests.support.job_kinds import TEST_KINDS, log_lines
from tests.support.job_workers import (
    HANG_SECONDS,
    WorkerProcess,
    cancel,
    job_settings,
    put,
    seconds_to_cancel,
    until,
    wait_for_end,
    working,
)
from tests.support.processes import children


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A scheduler, and two workers that are processes of their own and are started again if they die."""
    with dask_cluster(threads=2) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[Any]:
    """Asks the cluster, beside the executors."""
    connect: Any = distributed.Client
    with connect(cluster, set_as_default=False) as made:
        yield made


@pytest.fixture(autouse=True)
def idle(cluster: Any) -> None:
    """What another test has cancelled is gone there: else a process of the cluster may be given three of four
    tasks, and one waits for its turn for as long as the others run."""
    workers = cluster.scheduler.workers
    until(lambda: not any(worker.processing for worker in list(workers.values())), "an idle cluster")


def address_of(cluster: Any) -> str:
    """HOST:PORT of the scheduler."""
    return str(cluster.scheduler_address).removeprefix("tcp://")


@pytest.fixture(scope="module")
def executor(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskExecutor]:
    """One for several tests, so that the cluster's processes have to warm up once."""
    settings = Settings(work_folder=tmp_path_factory.mktemp("work"))
    made = DaskExecutor(Setup(settings, TEST_KINDS), address_of(cluster))
    yield made
    made.close()


class Begun:
    """A task of the kind "made" that was handed over."""

    def __init__(self, executor: DaskExecutor, folder: Path, number: int, act: str) -> None:
        payload = {"folder": str(folder), "act": act, "number": number}
        order = Order(
            kind="made",
            phase="task",
            job_id=1,
            task_number=number,
            attempt_name=f"{folder.name}-{number}-{time.monotonic_ns()}",
            payload=payload,
        )
        self.told: list[int] = []
        self.outcomes: list[ProcessOutcome] = []
        self.ended = threading.Event()
        self.running: Running = executor.start(order, self.told.append, self._end)

    def _end(self, outcome: ProcessOutcome) -> None:
        self.outcomes.append(outcome)
        self.ended.set()

    def outcome(self) -> ProcessOutcome:
        """Once it has ended; there is only one."""
        assert self.ended.wait(HANG_SECONDS)
        assert len(self.outcomes) == 1
        return self.outcomes[0]


def pids(folder: Path) -> list[int]:
    """Of the subprocesses, as their tasks began."""
    return [int(line.split()[2]) for line in log_lines(folder) if line.startswith("task ")]


def began(folder: Path, count: int) -> None:
    """Wait until so many tasks have."""
    until(lambda: len(pids(folder)) >= count, f"{count} tasks")


def _at_work() -> tuple[int, set[int | None]]:
    """Of a process of the cluster: itself, and its subprocesses."""
    pools = dask._nurseries.values()
    return os.getpid(), {child.pid for pool in pools for child in list(pool._children.values())}


def hosts(client: Any, folder: Path) -> set[int]:
    """The processes of the cluster that the tasks which run now belong to."""
    begun = set(pids(folder))
    return {pid for pid, of_it in client.run(_at_work).values() if of_it & begun}


def cluster_pids(client: Any) -> set[int]:
    """Of its workers."""
    return set(client.run(os.getpid).values())


def test_a_job_runs_on_both_processes_of_the_cluster(
    database: Database, tmp_path: Path, cluster: Any, client: Any
) -> None:
    """Each task in a subprocess of its own there; planning and publishing stay with the worker."""
    job_id = put(database, tmp_path, *["wait:go"] * 4)
    settings = job_settings(database, tmp_path, executor=f"dask://{address_of(cluster)}", concurrency=4)
    both = cluster_pids(client)
    with working(settings, own_executor=True):
        until(lambda: hosts(client, tmp_path) == both, "tasks on both")
        (tmp_path / "go").touch()
        job = wait_for_end(database, job_id)
        assert job.state == "succeeded" and job.result == {"parts": 4, "text": "0\n1\n2\n3"}
        assert log_lines(tmp_path).count("published") == 1
        deaf = put(database, tmp_path, "hold:1000")
        began(tmp_path, 5)
        cancel(database, deaf)
        assert wait_for_end(database, deaf).state == "cancelled"
        assert not Path(f"/proc/{pids(tmp_path)[-1]}").exists()


def test_progress_results_and_errors_come_back(executor: DaskExecutor, tmp_path: Path) -> None:
    """How far a task is, what it returns, and why it failed, also if it was killed."""
    slow = Begun(executor, tmp_path, 0, "sleep:1")
    failed = Begun(executor, tmp_path, 1, "fail")
    away = Begun(executor, tmp_path, 2, "away")
    died = Begun(executor, tmp_path, 3, "die")
    assert slow.outcome().result == {"number": 0, "roots": ["checkpoints"]}
    assert slow.told and slow.told == sorted(slow.told) and slow.told[-1] <= 100
    errors = [one.outcome().error for one in (failed, away, died)]
    assert [error and (error.type, error.is_retryable) for error in errors] == [
        ("PermanentJobError", False),
        ("OSError", True),
        ("TaskProcessError", True),
    ]


def test_tasks_on_the_cluster_are_killed(executor: DaskExecutor, tmp_path: Path) -> None:
    """One that is deaf, and one that waits for its turn there: neither result nor error, and nothing runs."""
    deaf = [Begun(executor, tmp_path, number, "hold:1000") for number in range(4)]
    began(tmp_path, 4)
    waiting = Begun(executor, tmp_path, 9, "write")
    for one in deaf[:2]:
        one.running.has_begun = False  # type: ignore[attr-defined]  # as if nobody had heard of it yet
    for one in (waiting, *deaf):
        one.running.kill()
    assert [one.outcome() for one in (waiting, *deaf)] == [ProcessOutcome()] * 5
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids(tmp_path))
    assert "done 9" not in log_lines(tmp_path)


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_cancelling_takes_two_seconds_at_most(database: Database, tmp_path: Path, cluster: Any) -> None:
    """With the usual settings, for tasks that run and for those that wait for their turn on the cluster."""
    settings = job_settings(
        database,
        tmp_path,
        executor=f"dask://{address_of(cluster)}",
        poll_seconds=Settings().poll_seconds,
        concurrency=7,
    )
    with working(settings, own_executor=True):
        assert seconds_to_cancel(database, tmp_path, ["wait:never"] * 7, begun=4, within=2) <= 2


def test_one_that_waits_there_is_taken_back_at_once(executor: DaskExecutor, tmp_path: Path) -> None:
    """The scheduler knows that it has not begun, so that nobody waits for a sign of it."""
    running = [Begun(executor, tmp_path, number, "wait:never") for number in range(4)]
    began(tmp_path, 4)
    best = math.inf
    for number in range(8):  # the machine may be busy with other things
        waiting = Begun(executor, tmp_path, 5 + number, "write")
        remote: Any = waiting.running
        until(lambda remote=remote: remote.future is not None, "that it is handed over")  # type: ignore[misc]
        asked = time.monotonic()
        waiting.running.kill()
        assert waiting.outcome() == ProcessOutcome()
        best = min(best, time.monotonic() - asked)
        if best < 0.9:
            break
    for one in running:
        one.running.kill()
    assert [one.outcome() for one in running] == [ProcessOutcome()] * 4
    assert best < 0.9
    assert len(pids(tmp_path)) == 4


@pytest.mark.exhaustive
def test_a_process_of_the_cluster_dies(executor: DaskExecutor, tmp_path: Path, client: Any) -> None:
    """Its tasks are done by the others."""
    tasks = [Begun(executor, tmp_path, number, "wait:go") for number in range(4)]
    began(tmp_path, 4)
    os.kill(min(hosts(client, tmp_path)), signal.SIGKILL)
    (tmp_path / "go").touch()
    for number, one in enumerate(tasks):
        outcome = one.outcome()
        if outcome.result is None:  # it was lost with its process: an attempt that failed in passing
            assert outcome.error is None or outcome.error.is_retryable
            outcome = Begun(executor, tmp_path, number, "wait:go").outcome()
        assert outcome.result is not None and outcome.result["number"] == number
    until(lambda: len(cluster_pids(client)) == 2, "its successor")


def _finished() -> dict[str, Any]:
    return {"result": {"pid": os.getpid()}, "error": None}


def test_a_result_that_cannot_be_fetched_ends_its_task(
    executor: DaskExecutor, tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process there stops, or it is taken back, before the result is: lost in passing, and the ends of
    others are told as ever."""
    monkeypatch.setattr(dask, "_ANSWER_SECONDS", 1)
    began_one = Begun(executor, tmp_path, 0, "write")
    assert began_one.outcome().result is not None
    pid, address = next((pid, address) for address, pid in client.run(os.getpid).items())
    stopped, cancelled = (client.submit(_finished, workers=[address], pure=False) for _ in range(2))
    until(lambda: stopped.done() and cancelled.done(), "the results")
    cancelled.cancel()
    os.kill(pid, signal.SIGSTOP)
    try:
        for number, future in enumerate((stopped, cancelled)):
            lost = Begun(executor, tmp_path, 1 + number, "wait:never")
            remote: Any = lost.running
            until(lambda remote=remote: remote.future is not None, "that it is handed over")  # type: ignore[misc]
            executor._done(lost.running, future)  # type: ignore[arg-type]  # that of the cluster
            error = lost.outcome().error
            assert error is not None and (error.type, error.is_retryable) == ("DaskError", True)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_the_cluster_does_not_go_on_for_a_worker_that_died(
    database: Database, tmp_path: Path, cluster: Any
) -> None:
    """Nobody counts any more: within a lease the subprocesses on the cluster are ended."""
    put(database, tmp_path, "hold:1000")
    executor = f"dask://{address_of(cluster)}"
    with WorkerProcess(job_settings(database, tmp_path, executor=executor, lease_seconds=2.0)) as worker:
        began(tmp_path, 1)
        worker.kill()
        until(lambda: not Path(f"/proc/{pids(tmp_path)[0]}").exists(), "its end")


def test_a_cluster_that_is_not_there_fails_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it; the attempt has failed in passing."""
    monkeypatch.setattr(dask, "_ANSWER_SECONDS", 1)
    before = set(children(os.getpid()))
    executor = DaskExecutor(Setup(Settings(work_folder=tmp_path / "work"), TEST_KINDS), "127.0.0.1:1")
    begun = Begun(executor, tmp_path, 0, "write")
    assert len(set(children(os.getpid())) - before) == 1  # to clear away, and not started only then
    error = begun.outcome().error
    executor.close()
    assert error is not None and (error.type, error.is_retryable) == ("DaskError", True)
