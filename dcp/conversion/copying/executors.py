"""Who carries out the tasks: this thread, processes of this machine, Dask, or an executor of the caller's."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from dcp.conversion.copying.worker import END, receive, send
from dcp.storage.errors import CheckpointError, OptionError, PlanError

__all__ = ["DEFAULT_WORKERS", "Inline", "LocalProcesses", "open_executor"]

T = TypeVar("T")

DEFAULT_WORKERS: Final = max(1, min(4, len(os.sched_getaffinity(0))))
"""More do not help one disk, and each takes some 60 MiB."""

_END_SECONDS: Final = 10.0
"""Time for processes to end uploads; what is left of one after that is removed by the next writer."""

_START: Final = (
    # A terminal interrupts all of its processes: what becomes of these is decided by the one that made them.
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from dcp.conversion.copying.worker import serve; serve()"
)


class Inline(Executor):
    """Runs each call when it is submitted."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """The future is done when it returns."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised by result()
            future.set_exception(error)
        return future


class LocalProcesses(Executor):
    """Processes that are started for this and import no torch, nor the program of the caller.

    One that dies fails the call it was at, with CheckpointError. They end with this object, and with the
    process that made it, however that ends.
    """

    def __init__(self, workers: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_aborted = False
        self._threads = [
            threading.Thread(target=self._drive, name=f"dcp-convert-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """``fn`` and the arguments are pickled."""
        if kwargs:
            raise TypeError("calls in other processes take no keyword arguments here")
        future: Future[T] = Future()
        self._calls.put((future, fn, args))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; calls that run are waited for."""
        if cancel_futures:
            self._cancel()
        for _ in self._threads:
            self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def abort(self) -> None:
        """End the processes, whatever they are at: such a call fails with CheckpointError."""
        with self._lock:
            self._is_aborted = True
            running = list(self._processes)
        for process in running:
            process.terminate()
        self.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for process in running:
            process.kill()
        for thread in self._threads:
            thread.join()

    def _cancel(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call[0].cancel()

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_aborted:
                raise CheckpointError("the conversion was given up")
            process = _start()
            self._processes.add(process)
            return process

    def _finish(self, process: subprocess.Popen[bytes] | None) -> None:
        _end(process)
        with self._lock:
            self._processes -= {process}

    def _drive(self) -> None:
        process: subprocess.Popen[bytes] | None = None
        try:
            while (call := self._calls.get()) is not None:
                future, function, args = call
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    if process is None:
                        process = self._begin()
                    is_result, value = _ask(process, function, args)
                except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                    self._finish(process)
                    process = None
                    future.set_exception(error)
                    continue
                if is_result:
                    future.set_result(value)
                else:
                    future.set_exception(value)
        finally:
            self._finish(process)


def _start() -> subprocess.Popen[bytes]:
    # -I would lose the paths of an editable installation, and the user's own.
    return subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def _ask(process: subprocess.Popen[bytes], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if process.stdin is None or process.stdout is None:
        raise CheckpointError("a process of the conversion has no pipes")
    try:
        send(process.stdin, (function, args))
        return receive(process.stdout)
    except (EOFError, BrokenPipeError) as error:
        code = process.wait()
        raise CheckpointError(
            f"a process of the conversion ended with exit code {code} (negative: killed by that signal, 9 is "
            "often for want of memory). Convert again: what is done is not done twice; fewer workers need "
            "less memory",
        ) from error


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    with suppress(BrokenPipeError):  # it has ended already
        if process.stdin is not None:
            process.stdin.write(END)
            process.stdin.flush()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):  # of what could not be written
                stream.close()
    process.wait()


@contextmanager
def open_executor(executor: str | Executor, workers: int | None) -> Iterator[tuple[Executor, int]]:
    """(executor, calls that it should have at a time). What is made here is ended here.

    ``executor`` is ``inline``, ``processes``, ``dask://host:port`` or an executor. PlanError for other names.
    """
    if workers is not None and workers < 1:
        raise OptionError(f"workers must be positive, not {workers}")
    if isinstance(executor, Executor):
        yield executor, workers or 4 * DEFAULT_WORKERS
    elif executor == "inline":
        yield Inline(), 1
    elif executor == "processes":
        count = workers or DEFAULT_WORKERS
        pool = LocalProcesses(count)
        try:
            yield pool, count + 1
        except BaseException:  # a task of an object store's may have hours to go
            pool.abort()
            raise
        pool.shutdown()
    elif isinstance(executor, str) and executor.startswith("dask://"):
        with _dask(executor.removeprefix("dask://")) as (cluster, threads):
            yield cluster, workers or 2 * threads
    else:
        raise OptionError(
            f"executor must be 'inline', 'processes', 'dask://host:port' or an Executor, not {executor!r}"
        )


@contextmanager
def _dask(address: str) -> Iterator[tuple[Executor, int]]:
    try:
        import distributed
    except ImportError as error:
        raise PlanError(
            "converting on Dask needs the package distributed: pip install 'dcphub[dask]'"
        ) from error
    connect: Any = distributed.Client
    with connect(f"tcp://{address}", set_as_default=False) as client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise PlanError(f"the Dask cluster at {address} has no workers")
        with client.get_executor(pure=False) as pool:
            yield pool, threads
