"""A real `dcp serve` (or `dcp worker`) in processes of its own, on loopback, with the settings of a test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx

from tests.support.ports import free_port
from tests.support.processes import command_of, environment_of
from tests.support.programs import Program

__all__ = ["DcpProcess", "Service", "ServiceError", "Worker", "wait_until"]

T = TypeVar("T")

_MARK: Final = "DCP_TEST_SERVICE"
"""Environment variable that marks all processes of one service, so that only these are killed."""

_ROOT: Final = Path(__file__).parents[2]
_READY_SECONDS: Final = 240.0
_STOP_SECONDS: Final = 60.0
_GONE_SECONDS: Final = 30.0
_SHOWN_LOG_LINES: Final = 60
_START_ATTEMPTS: Final = 3


class ServiceError(AssertionError):
    """A process did not do its work; the message has the end of its log."""


def wait_until(look: Callable[[], T], description: str, seconds: float = 300.0) -> T:
    """Wait until ``look`` returns a true value, and return the value. Raises ServiceError after ``seconds``.

    Broken connections count as "not yet".
    """
    give_up = time.monotonic() + seconds
    last: object = None
    while True:
        try:
            if found := look():
                return found
            last = found
        except httpx.TransportError as error:
            last = error
        if time.monotonic() > give_up:
            raise ServiceError(f"not within {seconds:g} s: {description}; last seen: {last!r}")
        time.sleep(0.05)


class DcpProcess:
    """``dcp ARGUMENTS`` in ``folder``, with ``settings`` of the server in its environment.

    A context manager. The process ends with the thread that starts it. `stop` and `kill` kill remaining child
    processes. ``environment`` adds variables; no ``DCP_*`` is inherited. The process is forked from one with
    all imports done, unless ``is_fresh``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        is_fresh: bool = False,
    ) -> None:
        self.is_fresh = is_fresh
        self.arguments = list(arguments)
        self.folder = folder
        self.settings = dict(settings or {})
        self.extra_environment = dict(environment or {})
        self.mark = uuid.uuid4().hex
        self.log_path = folder / f"dcp-{self.arguments[0]}-{self.mark[:8]}.log"
        self._process: subprocess.Popen[Any] | Program | None = None

    # -- life ------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the process, and return at once."""
        assert self._process is None or self._process.poll() is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            options: dict[str, Any] = {
                "cwd": self.folder,
                "env": self.environment(),
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": subprocess.STDOUT,
                "start_new_session": True,  # Ctrl-C reaches only the tests, which then stop the service
            }
            if self.is_fresh:
                tied = [sys.executable, "-c", _TIED_TO_PARENT, str(os.getpid())]
                self._process = subprocess.Popen([*tied, *self.arguments], **options)
            else:
                self._process = Program(*self.command(), ends_with_parent=True, **options)
        return self

    def command(self) -> tuple[str, ...]:
        """Return the arguments of the process's Python."""
        return ("-m", "dcp", *self.arguments)

    def stop(self, seconds: float = _STOP_SECONDS) -> int:
        """Stop the process by SIGTERM, and return its exit status. ServiceError if it must be killed.

        Remaining child processes are killed as well, and named in a ServiceError.
        """
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServiceError(f"SIGTERM did not end it within {seconds:g} s\n{self.log_tail()}") from None
        # signalled children end by themselves, shortly after
        give_up = time.monotonic() + seconds
        while (left := self.pids()) and time.monotonic() < give_up:
            time.sleep(0.05)
        if left:
            names = [command_of(pid) for pid in left]
            self.kill()
            raise ServiceError(f"it ended and left processes behind: {names}\n{self.log_tail()}")
        self._process = None
        return status

    def kill(self) -> None:
        """Send SIGKILL to the process and all its children at once. Idempotent."""
        give_up = time.monotonic() + _GONE_SECONDS
        while pids := self.pids():
            for pid in pids:
                self.kill_pid(pid)
            if self._process is not None:
                self._process.poll()  # reap the zombie
            if time.monotonic() > give_up:
                raise ServiceError(f"processes {pids} survive SIGKILL")
            time.sleep(0.05)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def kill_parent(self) -> None:
        """Send SIGKILL to the process itself; its children continue, if they can."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_pid(self, pid: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to one of `pids`, unless it has ended."""
        if _is_marked(pid, self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.stop()
        finally:
            self.kill()
        if kind is not None:
            # pytest shows the output below the failure
            print(f"--- log of dcp {' '.join(self.arguments)} ---\n{self.log_tail()}")

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The id of the process itself."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status; None while the process runs."""
        return None if self._process is None else self._process.poll()

    def pids(self, *words: str) -> list[int]:
        """Return living processes of this service, itself included, with all ``words`` in the command
        line."""
        marked = [pid for pid in _all_pids() if _is_marked(pid, self.mark)]
        return [pid for pid in marked if all(word in command_of(pid).split() for word in words)]

    def log(self) -> str:
        """Return the output of the process and its children."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        """Return the end of the log."""
        return "\n".join(self.log().splitlines()[-_SHOWN_LOG_LINES:])

    def environment(self) -> dict[str, str]:
        """Return the environment of the process."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("DCP_") and not name.lower().endswith("_proxy")
        }
        settings = {
            f"DCP_SERVER_{name.upper()}": str(value) if isinstance(value, str | Path) else json.dumps(value)
            for name, value in self.settings.items()
        }
        path = os.pathsep.join(filter(None, (str(_ROOT), inherited.get("PYTHONPATH"))))
        fixed = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", _MARK: self.mark}
        return inherited | fixed | settings | self.extra_environment


class Worker(DcpProcess):
    """``dcp worker``, for a service without a worker of its own."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(["worker"], folder, settings, **options)


class Service(DcpProcess):
    """``dcp serve`` on a free port of loopback; accepts requests once `start` returns.

    A second `start` after `stop` or `kill` uses the same port and settings.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        ready: bool = True,
        is_fresh: bool = False,
    ) -> None:
        super().__init__(["serve"], folder, settings, environment=environment, is_fresh=is_fresh)
        self._waits_for_ready = ready
        self._has_port = "port" in self.settings

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``."""
        return f"http://127.0.0.1:{self.settings['port']}"

    def start(self) -> Self:
        """Start the service and wait until ``/readyz`` (or, with ready=False, ``/healthz``) answers 200."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            if not self._has_port:
                self.settings["port"] = free_port()
            super().start()
            try:
                self.wait_for("/readyz" if self._waits_for_ready else "/healthz")
            except _PortTakenError:
                if attempt == _START_ATTEMPTS or self._has_port:
                    raise
                continue
            except BaseException:
                self.kill()
                raise
            self._has_port = True
            return self
        raise AssertionError("unreachable")

    def wait_for(self, path: str, status: int = 200, seconds: float = _READY_SECONDS) -> httpx.Response:
        """Wait until a GET of ``path`` has this status; return the answer. ServiceError after ``seconds``."""
        give_up = time.monotonic() + seconds
        seen: object = "nothing"
        with self.client() as client:
            while time.monotonic() < give_up:
                if self.exit_status is not None:
                    taken = re.search(
                        r"address already in use|port \d+ of \S+ is taken", self.log_tail().lower()
                    )
                    kind = _PortTakenError if taken else ServiceError
                    raise kind(f"dcp serve ended with {self.exit_status}\n{self.log_tail()}")
                try:
                    answer = client.get(path)
                    if answer.status_code == status:
                        return answer
                    seen = f"{answer.status_code} {answer.text[:500]}"
                except httpx.TransportError as error:
                    seen = repr(error)
                time.sleep(0.05)
        raise ServiceError(f"{path}: no {status} within {seconds:g} s, but {seen}\n{self.log_tail()}")

    def client(self, key: str | None = None, *, timeout_seconds: float = 60.0) -> httpx.Client:
        """Return a plain HTTP client, with the API key if ``key`` is given; no redirects, no proxy."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_seconds, trust_env=False, verify=False
        )


class _PortTakenError(ServiceError):
    """Another process bound the port in the meantime."""


# Runs in the new process before the command: a killed test process leaves no server behind.
_TIED_TO_PARENT: Final = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    raise SystemExit("the test is gone")
os.execv(sys.executable, [sys.executable, "-m", "dcp", *sys.argv[2:]])
"""


def _all_pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            yield int(entry.name)


def _is_marked(pid: int, mark: str) -> bool:
    """Return True if ``pid`` is alive and belongs to this service: process ids are reused."""
    return f"{_MARK}={mark}".encode() in environment_of(pid)
