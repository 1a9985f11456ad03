"""Executors of tasks: this thread, processes of this machine, Dask, or an executor of the caller's.

`serve` is what a process of `LocalProcesses` runs: pickles in, pickles out, no torch. It is started as a
program of its own, so that the program of the caller is not imported a second time.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, Final, NoReturn, TypeVar

from dcp.storage.errors import CheckpointError, OptionError, PlanError

__all__ = ["DEFAULT_WORKERS", "LocalProcesses", "check_executor", "run_all", "serve"]

T = TypeVar("T")
Item = TypeVar("Item")

DEFAULT_WORKERS: Final = max(1, min(4, len(os.sched_getaffinity(0))))
"""More do not help one disk, and each takes some 60 MiB."""

_END_SECONDS: Final = 10.0
"""Time for processes to end uploads; what is left of one after that is removed by the next writer."""

_START: Final = (
    # A terminal interrupts all of its processes: what becomes of these is decided by the one that made them.
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from dcp.conversion.copying.executors import serve; serve()"
)

_LENGTH: Final = struct.Struct("<Q")
_END: Final = _LENGTH.pack(0)
"""After the last message: the stream itself does not end while a fork of the sender holds it open."""


def run_all(
    items: list[Item],
    function: Callable[[Item], T],
    take: Callable[[Item, T], None],
    *,
    executor: str | Executor,
    workers: int | None,
    before: Callable[[Item], None],
) -> None:
    """Have ``function`` of each of ``items`` carried out, some at a time: ``before`` is called with an item
    before that, ``take`` with it and the result. The list is empty then: items take much memory.

    ``executor`` is ``inline``, ``processes``, ``dask://host:port`` or an executor (`check_executor`).
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
    """Provide an executor and the number of calls that it should have at a time. Those made here are ended
    here."""
    if isinstance(executor, Executor):
        yield executor, workers or 4 * DEFAULT_WORKERS
    elif executor == "processes":
        count = workers or DEFAULT_WORKERS
        pool = LocalProcesses(count)
        try:
            yield pool, count + 1
        except BaseException:  # a task of an object store's may have hours to go
            pool.abort()
            raise
        pool.shutdown()
    else:
        with _dask(executor.removeprefix("dask://")) as (cluster, threads):
            yield cluster, workers or 2 * threads


def check_executor(executor: object, workers: int | None) -> None:
    """Raise OptionError for those that `run_all` does not take."""
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


# -- processes -----------------------------------------------------------------------------------------------


class LocalProcesses(Executor):
    """Processes that are started for this and import no torch, nor the program of the caller.

    Each is of a thread, which hands it calls and waits. One that dies fails the call it was at, with
    CheckpointError. They end with this object, and with the process that made it, however that ends: the
    threads are daemons, which the interpreter does not wait for, as it does for those of a
    ThreadPoolExecutor.
    """

    def __init__(self, workers: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
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
        """Queue a call; ``fn`` and the arguments are pickled."""
        future: Future[T] = Future()
        self._calls.put((future, (fn, args, kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; calls that run are waited for."""
        with suppress(queue.Empty):
            while cancel_futures:
                if (call := self._calls.get_nowait()) is not None:
                    call[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
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
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
        for thread in self._threads:
            thread.join()

    def _drive(self) -> None:
        """Have a process carry out calls, which is started with the first one, and anew if it died."""
        process: subprocess.Popen[bytes] | None = None
        try:
            while (call := self._calls.get()) is not None:
                future, order = call
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    process = process or self._begin()
                    is_result, value = _ask(process, order)
                except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                    if process is not None:
                        self._end(process)
                        process = None
                    future.set_exception(error)
                    continue
                if is_result:
                    future.set_result(value)
                else:
                    future.set_exception(value)
        finally:
            if process is not None:
                self._end(process)

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_aborted:
                raise CheckpointError("the conversion was given up")
            # -I would lose the paths of an editable installation, and the user's own.
            command = [sys.executable, "-c", _START, json.dumps(sys.path)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._processes.add(process)
            return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for stream, last in ((process.stdin, _END), (process.stdout, b"")):
            if stream is not None:
                with suppress(BrokenPipeError):  # it has ended already
                    if last:
                        stream.write(last)
                        stream.flush()
                with suppress(BrokenPipeError):  # of what could not be written
                    stream.close()
        process.wait()
        with self._lock:
            self._processes -= {process}


def _ask(process: subprocess.Popen[bytes], call: tuple[Any, ...]) -> Any:
    if process.stdin is None or process.stdout is None:
        raise CheckpointError("a process of the conversion has no pipes")
    try:
        _send(process.stdin, call)
        return pickle.loads(_receive(process.stdout))
    except (EOFError, BrokenPipeError) as error:
        code = process.wait()
        raise CheckpointError(
            f"a process of the conversion ended with exit code {code} (negative: killed by that signal, 9 is "
            "often for want of memory). Convert again: what is done is not done twice; fewer workers need "
            "less memory",
        ) from error


def _send(stream: IO[bytes], message: object) -> None:
    """Send one message, whole."""
    data = pickle.dumps(message, protocol=5)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """Return the next message; EOFError at `_END` or that of the stream, or if it ends within one."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size or head == _END:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def serve() -> None:
    """Carry out calls from stdin until its end, and send (True, result) or (False, exception) to what was
    stdout.

    On SIGTERM, and when stdin ends while a call runs, because the parent is gone, the call is broken off;
    what it writes to a store is taken back.
    """
    signal.signal(signal.SIGTERM, _leave)
    # What a library prints must not get between the messages.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    is_busy = threading.Event()
    threading.Thread(target=_listen, args=(calls, is_busy), daemon=True).start()
    while (call := calls.get()) is not None:
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
            _send(answers, answer)
        except BrokenPipeError:  # the parent is gone
            return


def _listen(calls: queue.SimpleQueue[bytes | None], is_busy: threading.Event) -> None:
    """Receive calls in a thread, so that the end of stdin is noticed during a call."""
    # Not sys.stdin, whose lock this thread would hold when the interpreter ends.
    stream = os.fdopen(os.dup(0), "rb")
    try:
        while True:
            calls.put(_receive(stream))
    except EOFError:
        pass
    finally:
        calls.put(None)
    if is_busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: not in the midst of taking back what was written
    sys.exit(128 + signal.SIGTERM)
