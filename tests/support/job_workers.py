"""Workers for tests: in threads of the test, or as processes that can be killed."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from sqlalchemy import func, select, update

from dcp.server.core.jobs.executors.executor import Executor
from dcp.server.core.jobs.ledger.reading import find_job, job_events_after, list_tasks
from dcp.server.core.jobs.ledger.rows import Backoff, JobSpec
from dcp.server.core.jobs.ledger.transitions import request_cancel, submit
from dcp.server.core.jobs.schedules import PeriodicWork
from dcp.server.core.jobs.worker import Worker, open_executor
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database
from dcp.server.database.tables import audit, jobs, tasks
from dcp.server.features import allowances, role_settings
from dcp.server.features import schedules as schedules_of
from dcp.server.records.jobs import Job, JobEvent, JobTask
from tests.support.forking import forkserver_context
from tests.support.job_kinds import TEST_KINDS, log_lines

__all__ = [
    "HANG_SECONDS",
    "Database",
    "WorkerProcess",
    "cancel",
    "close_executor",
    "events_of",
    "job_settings",
    "let_leases_end",
    "pids_of",
    "put",
    "records_of",
    "served_by",
    "state_of",
    "tasks_of",
    "until",
    "wait_for_end",
    "working",
]

HANG_SECONDS: Final = 120.0
"""A limit that only a hang exceeds, even on a busy machine."""

_QUICK: Final = Backoff(0.05, 0.2)


def job_settings(database: Database, folder: Path, **changes: Any) -> Settings:
    """Return settings of a fast worker on this database with the work folder ``folder / "work"``."""
    url = database.url.render_as_string(hide_password=False)
    values: dict[str, Any] = {
        "database_url": SecretStr(url),
        "work_folder": folder / "work",
        "poll_seconds": 0.05,
        "lease_seconds": 60.0,  # tests of expired leases set a shorter time
        "shutdown_seconds": 1.0,
    }
    return Settings(**(values | changes))


_shared: dict[str, Executor] = {}


def _shared_executor(settings: Settings) -> Executor:
    """Return an executor shared by this test process: starting its process takes most of a second."""
    name = settings.executor
    if name not in _shared:
        folder = Path(tempfile.mkdtemp(prefix="dcp-test-work-"))
        secret: Any = {"webhook_key": "s" * 32, "features": {"handover": {"wandb": {"api_key": "s"}}}}
        _shared[name] = open_executor(Settings(work_folder=folder, executor=name, **secret), TEST_KINDS)
        atexit.register(shutil.rmtree, folder, True)
        atexit.register(close_executor, name)
    return _shared[name]


def close_executor(name: str) -> None:
    """Close the shared executor with this name, if it exists."""
    if name in _shared:
        _shared.pop(name).close()


@contextmanager
def working(
    settings: Settings,
    *,
    schedules: Sequence[PeriodicWork] = (),
    kinds: str = TEST_KINDS,
    own_executor: bool = False,
) -> Iterator[Worker]:
    """Run a worker in a thread until the end of the block.

    Its subprocesses come from an executor shared by all tests, or with ``own_executor`` from a new one.
    """
    executor = None if own_executor else _shared_executor(settings)
    worker = Worker(
        settings,
        kinds=kinds,
        schedules=schedules,
        backoff=_QUICK,
        executor=executor,
        allowances=allowances(settings),
        roles=role_settings(settings),
    )
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,), name="test-worker")
    thread.start()
    try:
        yield worker
    finally:
        stop.set()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), "the worker does not stop"


def served_by(settings: Settings) -> AbstractContextManager[Worker]:
    """Run a worker like an operator: with all job kinds and all periodic work."""
    schedules = schedules_of(settings)
    return working(settings, kinds="dcp.server.features:kinds", own_executor=True, schedules=schedules)


def _serve(settings: Settings) -> None:
    """Run a worker process until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    Worker(settings, kinds=TEST_KINDS, schedules=(), backoff=_QUICK).run(stop)


class WorkerProcess:
    """A worker in a process of its own, to be killed or stopped."""

    def __init__(self, settings: Settings) -> None:
        self.process = forkserver_context().Process(target=_serve, args=(settings,))
        self.process.start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the process, like a crash."""
        self.process.kill()
        self.process.join(HANG_SECONDS)

    def pause(self) -> None:
        """Pause the process, which does not notice."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume after `pause`."""
        self._signal(signal.SIGCONT)

    def stop(self) -> int | None:
        """Stop in an orderly way; return the exit code."""
        self._signal(signal.SIGTERM)
        self.process.join(HANG_SECONDS)
        return self.process.exitcode

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def put(database: Database, folder: Path, *acts: str, **changes: Any) -> int:
    """Submit a job of the kind "made" with ``folder`` as its folder; return its id."""
    params = {"folder": str(folder), "acts": list(acts)}
    own = ("plan_act", "publish_act", "payload_bytes")
    params |= {name: changes.pop(name) for name in own if name in changes}
    spec = JobSpec(**({"kind": "made", "params": params, "created_by": "test"} | changes))
    return database.transact(lambda connection: submit(connection, spec, time.time()))


def cancel(database: Database, job_id: int) -> Job:
    """Request the cancellation of a job."""
    return database.transact(lambda connection: request_cancel(connection, job_id, time.time(), "test"))


def state_of(database: Database, job_id: int) -> Job:
    """Return a job in its current state."""
    with database.read() as connection:
        job = find_job(connection, job_id)
    assert job is not None
    return job


def tasks_of(database: Database, job_id: int) -> list[JobTask]:
    """Return the tasks of a job, by number."""
    with database.read() as connection:
        return list(list_tasks(connection, job_id).items)


def events_of(database: Database, job_id: int) -> list[JobEvent]:
    """Return the events of a job in order."""
    with database.read() as connection:
        return list(job_events_after(connection, job_id))


def records_of(database: Database) -> int:
    """Count the records of jobs of the kind "made"."""
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(audit)).scalar_one()


def let_leases_end(database: Database) -> None:
    """Expire all leases at once, as if their time had passed; a live worker renews its own."""
    for table in (jobs, tasks):
        late = update(table).where(table.c.lease_owner.is_not(None)).values(lease_until_seconds=1.0)
        database.transact(lambda connection, late=late: connection.execute(late))  # type: ignore[misc]


def pids_of(folder: Path, prefix: str = "task ") -> list[int]:
    """Return the ids of the processes that logged lines with ``prefix``."""
    return [int(line.split()[-1]) for line in log_lines(folder) if line.startswith(prefix)]


def until(holds: Callable[[], object], description: str) -> None:
    """Wait until ``holds`` returns a true value."""
    end = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < end, f"waited in vain for: {description}"
        time.sleep(0.03)


def wait_for_end(database: Database, job_id: int) -> Job:
    """Wait until a job has ended, and return it."""
    until(lambda: state_of(database, job_id).is_final, f"the end of job {job_id}")
    return state_of(database, job_id)
