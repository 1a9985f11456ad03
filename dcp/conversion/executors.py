"""Executors of tasks: this thread, local processes, Dask, or an executor of the caller.

`serve` runs in the processes of `LocalProcesses`. They exchange pickles and do not import torch. Each process
is started as a separate program, to avoid a second import of the caller's program.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

from dcp.storage.errors import CheckpointError, OptionError, PlanError

T = TypeVar("T")
Item = TypeVar("Item")

DEFAULT_WORKERS: Final = max(1, min(4, len(os.sched_getaffinity(0))))
"""More workers do not speed up a single disk; each takes about 60 MiB."""

_END_SECONDS: Final = 10.0
"""Time for processes to end uploads; the next writer removes leftovers."""

_START: Final = (
    # A terminal interrupts all processes; the parent decides when these end.
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from dcp.conversion.executors import serve; serve(int(sys.argv[2]))"
)


def run_all(
    items: list[Item],
    function: Callable[[Item], T],
    take: Callable[[Item, T], None],
    *,
    executor: str | Executor,
    workers: int | None,
    before: Callable[[Item], None],
) -> None:
    """Carry out ``function`` for each of ``items``, several at a time.

    ``before`` is called with an item before the call, ``take`` with the item and the result. ``items`` is
    emptied to free memory. ``executor`` is ``inline``, ``processes``, ``dask://host:port`` or an executor
    (`check_executor`).
    """
    items.reverse()
    if executor == "inline":
        while items:
            before(items[-1])
            take(items[-1], function(items.pop()))
        return
    with _open_executor(executor, workers) as (pool, at_once):
        pending: dict[Future[T], Item] = {}
        try:
            while items or pending:
                while len(pending) < at_once and items:
                    item = items.pop()
                    before(item)
                    pending[pool.submit(function, item)] = item
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    take(pending.pop(future), future.result())
        except BaseException:
            for future in pending:
                future.cancel()
            raise


@contextmanager
def _open_executor(executor: str | Executor, workers: int | None) -> Iterator[tuple[Executor, int]]:
    """Provide an executor and its number of concurrent calls; own executors are ended afterwards."""
    if isinstance(executor, Executor):
        yield executor, workers or 4 * DEFAULT_WORKERS
    elif executor == "processes":
        count = workers or DEFAULT_WORKERS
        pool = LocalProcesses(count)
        try:
            yield pool, count + 1
        except BaseException:  # do not wait for running tasks, which may take hours on an object store
            pool.shutdown(cancel_futures=True)
            raise
        pool.shutdown()
    else:
        with _dask(executor.removeprefix("dask://")) as (cluster, threads):
            yield cluster, workers or 2 * threads


def check_executor(executor: object, workers: int | None) -> None:
    """Raise OptionError for executors that `run_all` does not accept."""
    if workers is not None and workers < 1:
        raise OptionError(f"workers must be positive, not {workers}")
    is_named = executor in ("inline", "processes") or str(executor).startswith("dask://")
    if not isinstance(executor, Executor) and not (isinstance(executor, str) and is_named):
        raise OptionError(
            f"executor must be 'inline', 'processes', 'dask://host:port' or an Executor, not {executor!r}"
        )


@contextmanager
def _dask(address: str) -> Iterator[tuple[Executor, int]]:
    try:
        import distributed
    except ImportError as error:
        needed = "executor='dask://...' needs the package distributed: pip install 'dcphub[dask]'"
        raise PlanError(needed) from error
    connect: Any = distributed.Client
    with connect(f"tcp://{address}", set_as_default=False) as client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise PlanError(f"the Dask cluster at {address} has no workers: start dask workers first")
        with client.get_executor(pure=False) as pool:
            yield pool, threads


# -- processes -----------------------------------------------------------------------------------------------


class LocalProcesses(Executor):
    """Worker processes without torch and without the caller's program.

    Each process has a thread that sends calls and waits. A process that dies fails its current call with
    CheckpointError. Processes end with this object and with the parent process: the threads are daemons,
    unlike those of a ThreadPoolExecutor.
    """

    def __init__(self, workers: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._processes: dict[subprocess.Popen[bytes], Connection] = {}
        self._is_aborted = False
        self._threads = [
            threading.Thread(target=self._drive, name=f"dcp-convert-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a call; ``fn`` and the arguments are pickled."""
        future: Future[T] = Future()
        self._calls.put((future, (fn, args, kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes after their current calls; ``cancel_futures`` ends them at once, with
        CheckpointError."""
        with self._lock:
            self._is_aborted = cancel_futures
            running = [*self._processes] if cancel_futures else []
        for process in running:
            process.terminate()
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + _END_SECONDS
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
        for thread in self._threads if wait else ():
            thread.join()

    def _drive(self) -> None:
        """Send calls to a process, started with the first call and restarted after its death."""
        process: subprocess.Popen[bytes] | None = None
        while (call := self._calls.get()) is not None:
            future, order = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                process = process or self._begin()
                is_result, value = self._call(process, pickle.dumps(order, protocol=5))
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                is_result, value = False, error
                self._end(process)
                process = None
            if is_result:
                future.set_result(value)
            else:
                future.set_exception(value)
        self._end(process)

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_aborted:
                raise CheckpointError("the conversion was aborted")
            connection, theirs = Pipe()
            # -I would lose the paths of an editable installation, and the user's own.
            command = [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())]
            # Output of libraries goes to stderr: stdout may carry the result of a command.
            with theirs:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()]
                )
            self._processes[process] = connection
            return process

    def _call(self, process: subprocess.Popen[bytes], order: bytes) -> Any:
        """Return (True, result) or (False, exception) of a pickled function with arguments."""
        connection = self._processes[process]
        try:
            connection.send_bytes(order)
            answer = connection.recv_bytes()
        except (EOFError, OSError) as error:
            process.terminate()  # the connection is broken, so the process is useless even if alive
            code = process.wait()
            raise CheckpointError(
                f"a conversion process ended with exit code {code} (negative: killed by this signal; -9 "
                "often means out of memory). Convert again to resume; fewer workers need less memory"
            ) from error
        return pickle.loads(answer)

    def _end(self, process: subprocess.Popen[bytes] | None) -> None:
        """End a process after its current call."""
        if process is not None:
            with suppress(OSError):  # it has ended already
                # an end marker, because a fork of this process may hold the connection open
                self._processes[process].send_bytes(b"")
            self._processes[process].close()
            process.wait()
            with self._lock:
                del self._processes[process]


def serve(descriptor: int) -> None:
    """Carry out calls from the connection and send (True, result) or (False, exception).

    SIGTERM and the end of the parent interrupt the current call, and its writes to a store are undone.
    """
    signal.signal(signal.SIGTERM, _leave)
    connection = Connection(descriptor)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    is_busy = threading.Event()
    threading.Thread(target=_listen, args=(connection, calls, is_busy), daemon=True).start()
    while call := calls.get():
        is_busy.set()
        answer: tuple[bool, object]
        function, args, kwargs = pickle.loads(call)
        try:
            answer = True, function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised by whoever asked
            error.add_note("In a process of the conversion:\n" + traceback.format_exc())
            answer = False, error
        is_busy.clear()
        try:
            connection.send_bytes(pickle.dumps(answer, protocol=5))
        except OSError:  # the parent has ended
            return


def _listen(connection: Connection, calls: queue.SimpleQueue[bytes], is_busy: threading.Event) -> None:
    """Receive calls in a thread, to notice the end of the parent during a call."""
    call = b"begun"
    while call:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError, MemoryError):  # otherwise the process would wait forever
            call = b""
        calls.put(call)
    if is_busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    # only once, so that the cleanup of written files is not interrupted
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)
