"""Python programs of tests, forked from a process with torch imported, so that starting one costs no seconds.

They run as by ``python -c``, ``python -m`` and ``python FILE``: with a ``__main__``, arguments, folder,
environment and files of their own, under their own command line. Their child processes start without the
imports, and before Python 3.13 they call no exit handlers. A test of a program's start, imports, or exit
passes ``finalizes=True``, and gets a plain Python.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, Final, Self

from tests.support.forking import end_with_parent, forkserver_context
from tests.support.processes import rename_process

__all__ = ["Program", "run_program"]

_Stream = int | IO[Any] | None

_asking = threading.Lock()
"""A lock around multiprocessing, which polls all its processes whenever a thread starts or polls one."""


@dataclass(frozen=True)
class _Order:
    """The order to a process to become a program."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    has_session: bool
    ends_with_parent: bool


class Program:
    """A Python command line as a process: ``-c``, ``-m``, or a file, and arguments.

    Has the methods of `subprocess.Popen` used by tests; pipes are text. The default output is that of this
    process. If the tests end first, the process gets SIGTERM with ``ends_with_parent``, or SIGKILL.
    """

    def __init__(
        self,
        *arguments: str | Path,
        finalizes: bool = False,
        ends_with_parent: bool = False,
        stdin: _Stream = None,
        stdout: _Stream = None,
        stderr: _Stream = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        encoding: str | None = None,
        errors: str | None = None,
    ) -> None:
        self.args = [sys.executable, *map(str, arguments)]
        self.returncode: int | None = None
        self._talks: dict[str, tuple[threading.Thread, list[str]]] = {}
        order = _Order(
            self.args,
            str(Path.cwd() / (cwd or "")),
            dict(os.environ if env is None else env),
            start_new_session,
            ends_with_parent,
        )
        self.stdin, self.stdout, self.stderr = None, None, None
        with contextlib.ExitStack() as stack:
            ends: list[Connection] = []
            for name, wanted in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
                end, own = _ends(wanted, len(ends), ends)
                ends.append(stack.enter_context(end))
                if own is not None:
                    mode = "w" if name == "stdin" else "r"
                    setattr(self, name, os.fdopen(own, mode, encoding=encoding, errors=errors))
            self._process = _start_cold(order, ends) if finalizes else _start_forked(order, ends)
        self.pid: int = self._process.pid or 0

    stdin: IO[str] | None
    stdout: IO[str] | None
    stderr: IO[str] | None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status; `subprocess.TimeoutExpired` after ``timeout``."""
        if self.returncode is None:
            if not isinstance(self._process, BaseProcess):
                self.returncode = self._process.wait(timeout)
            elif not wait([self._process.sentinel], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            else:
                with _asking:
                    self._process.join()  # a fork closes its files shortly before its end
                    self.returncode = self._process.exitcode
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless the program has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the program has ended."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write ``text`` to the input, read the pipes to their ends, and wait; "" for streams without a pipe.

        After `subprocess.TimeoutExpired` another call continues.
        """
        for name, pipe in (("stdin", self.stdin), ("stdout", self.stdout), ("stderr", self.stderr)):
            if pipe is not None and name not in self._talks:
                pieces: list[str] = []
                arguments = (pipe, text or "", pieces)
                thread = threading.Thread(target=_talk, args=arguments, daemon=True)
                self._talks[name] = thread, pieces
                thread.start()
        self.wait(timeout)
        for thread, _ in self._talks.values():
            thread.join(timeout)
            if thread.is_alive():  # a child process holds the pipe
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        output, errors = ("".join(self._talks[one][1]) if one in self._talks else "" for one in _OUTPUTS)
        return output, errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdout, self.stderr, self.stdin):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.wait()


_OUTPUTS: Final = ("stdout", "stderr")


def _ends(wanted: _Stream, number: int, before: list[Connection]) -> tuple[Connection, int | None]:
    """Return the program's end of a stream, and this process's end of a pipe."""
    if wanted == subprocess.PIPE:
        reader, writer = multiprocessing.Pipe(duplex=False)
        own, passed = (writer, reader) if number == 0 else (reader, writer)
        with own:
            return passed, os.dup(own.fileno())
    if wanted == subprocess.DEVNULL:
        return Connection(os.open(os.devnull, os.O_RDWR)), None
    if wanted == subprocess.STDOUT:
        return Connection(os.dup(before[1].fileno())), None
    if wanted is None:
        wanted = number
    return Connection(os.dup(wanted if isinstance(wanted, int) else wanted.fileno())), None


def _talk(pipe: IO[str], text: str, output: list[str]) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:
        if pipe.writable():
            pipe.write(text)
        else:
            output.append(pipe.read())


def _start_cold(order: _Order, ends: list[Connection]) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = (end.fileno() for end in ends)
    return subprocess.Popen(
        order.command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=order.folder,
        env=order.environment,
        start_new_session=order.has_session,
    )


def _start_forked(order: _Order, ends: list[Connection]) -> BaseProcess:
    ready, not_yet = multiprocessing.Pipe(duplex=False)
    with ready:
        with not_yet, _asking:
            process = forkserver_context().Process(target=_become, args=(order, not_yet, *ends))
            process.start()
        ready.poll(None)  # from here on the process has its new name and its own signal handlers
    return process


def run_program(
    *arguments: str | Path, timeout_seconds: float = 280.0, stdin: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, like `subprocess.run` with ``capture_output``."""
    pipe = subprocess.PIPE
    streams = {"stdin": subprocess.DEVNULL if stdin is None else pipe, "stdout": pipe, "stderr": pipe}
    with Program(*arguments, **{**streams, **options}) as program:
        try:
            output, errors = program.communicate(stdin, timeout=timeout_seconds)
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(program.args, program.wait(), output, errors)


# -- the forked process --------------------------------------------------------------------------------------


def _become(order: _Order, not_yet: Connection, *ends: Connection) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    global _asking
    _asking = threading.Lock()  # this may be a fork of the process that holds the lock
    if order.has_session:
        os.setsid()
    end_with_parent(signal.SIGTERM if order.ends_with_parent else signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order.folder)
    try:
        rename_process(order.command, order.environment)
    except OSError:  # the system forbids renaming: keep the name
        os.execve(sys.executable, order.command, order.environment)
    not_yet.close()
    _take_over(order)
    try:
        _run(*(order.command[2:] if order.command[1] == "-u" else order.command[1:]))
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:  # noqa: BLE001 - printed like an uncaught exception
        traceback.print_exc()
        sys.exit(1)


def _take_over(order: _Order) -> None:
    """Set up the forked process like a new Python interpreter."""
    os.environ.clear()
    os.environ.update(order.environment)
    is_unbuffered = order.command[1] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False, buffering=1 if os.isatty(1) else -1)
    sys.stdout.reconfigure(write_through=is_unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *paths, *(path for path in sys.path if path not in ("", *paths))]
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)


def _run(kind: str, *rest: str) -> None:
    if kind == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = [kind, *rest[kind == "-c" :]]
    text, name = (rest[0], "<string>") if kind == "-c" else (Path(kind).read_text(), kind)
    if kind != "-c":
        sys.path[0] = str(Path(kind).resolve().parent)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(text, name, "exec"), main.__dict__)
