"""Processes that run jobs: a warm process that forks, and its children.

The warm process has imported the modules of the kinds and has no threads, files or connections. A forked
child therefore starts in milliseconds instead of seconds, with clean memory, and may be killed at any time.
The kernel kills the children of an ended warm process, which ends with its worker.

Packets on the control socket: ``{"start": N}`` with a socket for child N, ``{"kill": N}``; answers:
``{"started": N, "pid": P}`` and ``{"ended": N, "status": S}``, with S as in `os.waitpid`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from pydantic import SecretStr, ValidationError
from sqlalchemy.exc import SQLAlchemyError

from dcp.server.catalog.inputs import clean_text
from dcp.server.core.jobs.executors.executor import Order, receive_message, send_message
from dcp.server.core.jobs.kind import (
    JobContext,
    Kind,
    PermanentJobError,
    TransientJobError,
    is_environment,
    is_retryable,
)
from dcp.server.core.problems import ProblemError
from dcp.server.core.roots import storage_problem
from dcp.server.core.settings import Settings
from dcp.server.records.jobs import JobFailure
from dcp.storage.errors import CheckpointError

CONTROL_BYTES: Final = 4096
NO_DATABASE: Final = SecretStr("sqlite:////dev/null/none")
TOO_MUCH_MEMORY: Final = "TaskMemoryError"
_PR_SET_PDEATHSIG: Final = 1
_MEMORY_SLACK_BYTES: Final = 1 << 30
_PROGRESS_SECONDS: Final = 0.2
_MAX_DETAIL_CHARACTERS: Final = 4000
_EXPECTED: Final = (ProblemError, CheckpointError, OSError, PermanentJobError, TransientJobError)


@dataclass(frozen=True)
class Setup:
    """The first message to the warm process. ``kinds`` names a mapping of kinds as ``module:attribute``."""

    settings: Settings = field(repr=False)
    kinds: str

    def settings_for(self, *kinds: Kind[Any]) -> Settings:
        """Return the settings without foreign secrets: the database URL, webhook keys, and settings of other
        features."""
        owners = {kind.feature for kind in kinds}
        kept: dict[str, Any] = {"webhook_key": None, "webhook_key_before": None}
        kept["features"] = {name: one for name, one in self.settings.features.items() if name in owners}
        if not any(kind.needs_database for kind in kinds):
            kept["database_url"] = NO_DATABASE
        return self.settings.model_copy(update=kept)


def load_kinds(name: str) -> Mapping[str, Kind[Any]]:
    """Return the kinds named ``module:attribute``: a mapping, or a function that returns a mapping."""
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    kinds: Mapping[str, Kind[Any]] = found() if callable(found) else found
    return kinds


def serve(control_fd: int) -> None:
    """Run the warm process until the control socket closes."""
    control = socket.socket(fileno=control_fd)
    with socket.socket(fileno=_receive_fd(control)) as setup_socket, setup_socket.makefile("rb") as stream:
        setup: Setup = pickle.load(stream)  # from the worker, the parent process
    kinds = load_kinds(setup.kinds)
    for module in {name for kind in kinds.values() for name in kind.preload}:
        importlib.import_module(module)
    if any(root.url.startswith("s3") for root in setup.settings.roots.values()):
        with contextlib.suppress(ImportError):  # opening S3 reports the missing package
            _prepare_s3()
    os.dup2(2, 1)  # prints of libraries go to the log
    gc.collect()
    gc.freeze()  # avoids page copies during collections in children
    _Warm(control, setup, kinds).run()


def _prepare_s3() -> None:
    """Import and read the data of the first S3 client: half a second saved per child."""
    import dcp.storage.stores.objects.s3  # noqa: F401
    from dcp.storage.stores.objects.bucket import read_descriptions

    read_descriptions()


def _receive_fd(control: socket.socket) -> int:
    _, fds, _, _ = socket.recv_fds(control, CONTROL_BYTES, 1)
    if not fds:
        raise EOFError("the setup message has no socket")
    return fds[0]


class _Warm:
    """Forks, reaps and kills children; only it knows if a process id is still its child."""

    def __init__(self, control: socket.socket, setup: Setup, kinds: Mapping[str, Kind[Any]]) -> None:
        self._control = control
        self._setup = setup
        self._kinds = kinds
        self._pids: dict[int, int] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM):  # only the worker decides when this process ends
            signal.signal(number, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake in ready:
                    self._wake.recv(CONTROL_BYTES)
                    self._reap()
                if self._control in ready and not self._obey():
                    break
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for pid in self._pids.values():
            _kill(pid)
        for pid in self._pids.values():  # leave no child behind
            os.waitpid(pid, 0)

    def _obey(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, CONTROL_BYTES, 1)
        except ConnectionResetError:  # the worker died with unread data
            return False
        if not data:
            return False
        message = json.loads(data)
        if "start" in message:
            self._start(message["start"], fds[0])
        elif (pid := self._pids.get(message["kill"])) is not None:
            _kill(pid)
        return True

    def _start(self, number: int, fd: int) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(fd)
            self._say({"ended": number, "status": None, "error": f"fork: {error.strerror}"})
            return
        if pid == 0:
            self._be_child(fd, parent)
        os.close(fd)
        self._pids[number] = pid
        self._say({"started": number, "pid": pid})

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                self._say({"ended": number, "status": status})

    def _say(self, message: Mapping[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:  # the worker has ended; the main loop notices
            return

    def _be_child(self, fd: int, parent: int) -> NoReturn:
        code = 1
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:  # otherwise the parent died before the request reached the kernel
                os.setsid()
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                for end in (self._control, self._wake, self._woken):
                    end.close()
                with socket.socket(fileno=fd) as connection:
                    _work(connection, self._setup, self._kinds)
                code = 0
        except BaseException:  # noqa: BLE001 - a forked child must not return into its parent's code
            traceback.print_exc()
        finally:
            os._exit(code)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the child may not have its process group yet
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _work(connection: socket.socket, setup: Setup, kinds: Mapping[str, Kind[Any]]) -> None:
    order = Order(**receive_message(connection))
    _limit_memory(order.memory_bytes)
    try:
        answer: dict[str, Any] = {"result": _carry_out(connection, order, setup, kinds)}
        send_message(connection, answer)
    except SystemExit as error:
        said = f"the kind {order.kind} called sys.exit({error.code!r}); it must return or raise an error"
        failure = JobFailure(type="SystemExit", detail=said[:_MAX_DETAIL_CHARACTERS], is_retryable=False)
        send_message(connection, {"error": asdict(failure)})
    except Exception as error:  # noqa: BLE001 - it is the answer
        if not isinstance(error, _EXPECTED):
            traceback.print_exc()  # possibly a bug: log the traceback
        send_message(connection, {"error": asdict(error_of(error, order.memory_bytes))})


def _limit_memory(memory_bytes: int) -> None:
    """Bound memory growth faster than the worker's polling of resident memory."""
    if memory_bytes:
        limit = memory_bytes + _MEMORY_SLACK_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or hard > limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _carry_out(
    connection: socket.socket, order: Order, setup: Setup, kinds: Mapping[str, Kind[Any]]
) -> Mapping[str, Any]:
    kind = kinds[order.kind]
    context = JobContext(
        settings=setup.settings_for(kind),
        job_id=order.job_id,
        task_number=order.task_number,
        attempt_name=order.attempt_name,
        work_folder=Path(order.work_folder),
        prepared=order.prepared,
    )
    if order.phase == "plan":
        plan = kind.plan(context, kind.params.model_validate(order.params))
        specs = [{"payload": dict(spec.payload), "weight_bytes": spec.weight_bytes} for spec in plan.tasks]
        return {"plan_data": dict(plan.plan_data), "tasks": specs}
    if order.phase == "task":
        return kind.run_task(context, order.payload, _Reporting(connection))
    if order.phase == "publish":
        return kind.publish(context, order.plan_data, order.results)
    if order.plan_data:
        kind.discard(context, order.plan_data)
    if kind.leaves_plans:
        kind.clear_plans(context, kind.params.model_validate(order.params))
    return {}


class _Reporting:
    """Reports progress to the worker a few times a second, from one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._told_seconds = 0.0

    def __call__(self, done_bytes: int) -> None:
        now = time.monotonic()
        if now - self._told_seconds >= _PROGRESS_SECONDS:
            self._told_seconds = now
            send_message(self._connection, {"done_bytes": int(done_bytes)})


def error_of(error: BaseException, memory_bytes: int = 0) -> JobFailure:
    """Return an exception as a failure for the ledger."""
    if isinstance(error, MemoryError):
        return JobFailure(
            type=TOO_MUCH_MEMORY,
            detail=f"the task needs more memory than task_memory_bytes={memory_bytes} allows",
            is_retryable=False,
        )
    if isinstance(error, ProblemError | CheckpointError | OSError):
        detail = storage_problem(error).detail  # without places and secrets
    elif isinstance(error, ValidationError):
        detail = f"invalid parameters: {error.error_count()}"
    elif isinstance(error, SQLAlchemyError):
        detail = f"database error: {type(error).__name__}"  # without the statement's parameters
    else:
        detail = str(error)
    return JobFailure(
        type=type(error).__name__,
        detail=clean_text(detail)[:_MAX_DETAIL_CHARACTERS] or type(error).__name__,
        is_retryable=is_retryable(error),
        is_environment=is_environment(error),
    )
