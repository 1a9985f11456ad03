"""Workers of the tests: in threads of the test, or as processes that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from dcp.server.database.engine import Database
from dcp.server.jobs.ledger import Backoff, Job, JobSpec, find_job, request_cancel, submit
from dcp.server.jobs.schedules import Schedule
from dcp.server.jobs.worker import Worker
from dcp.server.settings import Settings
from tests.support.job_kinds import TEST_KINDS

__all__ = [
    "HANG_SECONDS",
    "WorkerProcess",
    "cancel",
    "job_settings",
    "put",
    "state_of",
    "until",
    "wait_for_end",
    "working",
]

HANG_SECONDS: Final = 120.0
"""Only what hangs takes longer, on a machine that has much else to do."""

_QUICK: Final = Backoff(0.05, 0.2)
_START: Final = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from tests.support.job_workers import serve; serve(sys.argv[2])"
)


def job_settings(database: Database, folder: Path, **changes: Any) -> Settings:
    """Settings of a quick worker on this database; its work folder is ``folder / "work"``."""
    url = database.url.render_as_string(hide_password=False)
    values: dict[str, Any] = {
        "database_url": SecretStr(url),
        "work_folder": folder / "work",
        "poll_seconds": 0.05,
        "lease_seconds": 60.0,  # a test that wants a lease to run out says so
        "shutdown_seconds": 1.0,
    }
    return Settings(**(values | changes))


@contextmanager
def working(
    settings: Settings, *, schedules: Sequence[Schedule] = (), kinds: str = TEST_KINDS
) -> Iterator[Worker]:
    """A worker in a thread, which is stopped at the end."""
    worker = Worker(settings, kinds=kinds, schedules=schedules, backoff=_QUICK)
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,), name="test-worker")
    thread.start()
    try:
        yield worker
    finally:
        stop.set()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), "the worker does not stop"


def serve(text: str) -> None:
    """Be a worker process until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    values = json.loads(text)
    values["database_url"] = SecretStr(values["database_url"])
    Worker(Settings(**values), kinds=TEST_KINDS, schedules=(), backoff=_QUICK).run(stop)


class WorkerProcess:
    """A worker in a process of its own, to be killed or stopped."""

    def __init__(self, settings: Settings) -> None:
        values = settings.model_dump(mode="json", exclude_unset=True)
        values["database_url"] = settings.database_url.get_secret_value()
        command = [sys.executable, "-c", _START, json.dumps(sys.path), json.dumps(values)]
        self.process = subprocess.Popen(command, start_new_session=True)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """As a crash does it."""
        self.process.kill()
        self.process.wait(HANG_SECONDS)

    def pause(self) -> None:
        """It does nothing any more, and does not know."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """After `pause`."""
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> int:
        """In good order; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_SECONDS)


def put(database: Database, folder: Path, *acts: str, **changes: Any) -> int:
    """Submit a job of the kind "made", which works in ``folder``; its id."""
    params = {"folder": str(folder), "acts": list(acts)}
    params |= {name: changes.pop(name) for name in ("plan_act", "publish_act") if name in changes}
    spec = JobSpec(kind="made", params=params, created_by="test", **changes)
    return database.transact(lambda connection: submit(connection, spec, time.time()))


def cancel(database: Database, job_id: int) -> Job:
    """Ask for it."""
    return database.transact(lambda connection: request_cancel(connection, job_id, time.time(), "test"))


def state_of(database: Database, job_id: int) -> Job:
    """The job as it is now."""
    with database.read() as connection:
        job = find_job(connection, job_id)
    assert job is not None
    return job


def until(holds: Callable[[], object], what: str) -> None:
    """Wait for it."""
    end = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < end, f"waited in vain for: {what}"
        time.sleep(0.01)


def wait_for_end(database: Database, job_id: int) -> Job:
    """The job, once it is over."""
    until(lambda: state_of(database, job_id).is_final, f"the end of job {job_id}")
    return state_of(database, job_id)
