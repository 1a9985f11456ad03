"""Servers shared by all processes of one test run, started by the first test that needs them, or while the
workers collect tests: most of the seconds of a start are waiting time.

A process of its own keeps each server, and ends it at the end of the run, even if the run is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = ["shared_server"]

_ROOT: Final = Path(__file__).parents[2]
Address = dict[str, Any]
"""Address and credentials of a server."""


def _run_pid() -> int:
    """Return the process whose end is the end of the run: with workers, their parent process."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def shared_server(
    name: str, folders: pytest.TempPathFactory, prepare: Callable[[Address], None] = lambda found: None
) -> Address:
    """Return the address of the server ``name``; the first caller runs ``prepare`` before any other
    returns."""
    folder = folders.getbasetemp()
    if os.getpid() != _run_pid():
        folder = folder.parent  # the folder of all workers
    place = folder / f"{name}-server.json"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _started(name, place)
        is_prepared = place.with_suffix(".prepared")
        if not is_prepared.exists():
            prepare(known)
            is_prepared.touch()
        return known


def _started(name: str, place: Path) -> Address:
    """Return the address; start the server if it is not recorded yet. Requires the lock."""
    if not place.exists():
        place.write_text(json.dumps(_start(name, place.with_suffix(".log"), _run_pid())))
    known: Address = json.loads(place.read_text())
    return known


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start all servers in the first of several workers, during its collection."""
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0" and not session.config.getoption("collectonly"):
        folder = Path(session.config.getoption("basetemp")).parent
        for name in _SERVERS:
            threading.Thread(target=_start_early, args=(name, folder), daemon=True).start()


def _start_early(name: str, folder: Path) -> None:
    place = folder / f"{name}-server.json"
    with suppress(AssertionError), place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _started(name, place)  # tests that need the server report a failed start


def _start(name: str, log_path: Path, run_pid: int) -> Address:
    with log_path.open("wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", __name__, name, str(run_pid)],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests, which may need the server to clean up
        )
    assert keeper.stdout is not None
    with keeper.stdout as answer:
        line = answer.readline()
    keeper.returncode = 0  # the keeper outlives this process on purpose, so suppress the ResourceWarning
    if not line:
        raise AssertionError(f"the server {name} does not start\n{log_path.read_text()}")
    found: Address = json.loads(line)
    return found


# -- the process that keeps a server -------------------------------------------------------------------------


@contextmanager
def _s3() -> Iterator[Address]:
    from dcp.demo.s3_server import S3Server

    names = ("bucket", "public_bucket", "access_key", "secret_key", "endpoint_url")
    with (
        tempfile.TemporaryDirectory(prefix="dcp-s3-") as folder,
        S3Server(Path(folder) / "data", public_bucket="dcp-public") as server,
    ):
        yield {"folder": str(server.folder), **{name: getattr(server, name) for name in names}}


@contextmanager
def _postgres() -> Iterator[Address]:
    from tests.support.postgres import PostgresProgram

    with PostgresProgram() as program:
        yield {"url": program.url}


_SERVERS: Final[Mapping[str, Callable[[], AbstractContextManager[Address]]]] = {
    "postgres": _postgres,
    "s3": _s3,
}


def _keep(name: str, run_pid: int) -> None:
    run = os.pidfd_open(run_pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with _SERVERS[name]() as found:
        print(json.dumps(found), flush=True)
        select.select([run], [], [])


if __name__ == "__main__":
    _keep(sys.argv[1], int(sys.argv[2]))
