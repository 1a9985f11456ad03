"""Python programs of tests that come from a process which has torch imported: to start one costs no seconds.

They are run as by ``python -c`` and ``python -m``: with a ``__main__``, arguments, folder, environment and
files of their own, and under their own command line; what they start of Python comes from there, too. A test
that is about what a program imports, about its memory or about its start has to use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from dcp.background.process import child
from tests.support.forking import ADDRESS
from tests.support.processes import lives, rename_process
from tests.support.warm_writers import end_with_parent, fork_one, start_warm

__all__ = ["Program", "run_program", "use_cold_programs", "use_warm_programs", "warm_programs"]

_FROZEN: Final = ("runpy", "importlib._bootstrap", "importlib._bootstrap_external")
_HEEDED: Final = {
    *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONIOENCODING", "PYTHONWARNINGS")
}
"""Of the variables that Python has; or they make no difference here."""

_execute_child: Final = subprocess.Popen._execute_child  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Order:
    """What a process is to become."""

    parent: int
    command: list[str]
    folder: str
    environment: dict[str, str]
    has_session: bool
    finalizes: bool
    ends_with_parent: bool


class Program(subprocess.Popen[str]):
    """`subprocess.Popen`, of what follows ``python`` on a command line: ``-c``, ``-m`` or a file, arguments.

    Where nothing else is said, its output is that of this process. It ends once its threads and exit handlers
    have; only with ``finalizes`` does it take the time to end its interpreter, which has all of torch to let
    go. With ``ends_with_parent`` it gets SIGTERM if the tests end before it.
    """

    _teller: socket.socket
    _finalizes = False
    _ends_with_parent = False

    def __init__(
        self, *arguments: str | Path, finalizes: bool = False, ends_with_parent: bool = False, **options: Any
    ) -> None:
        self._finalizes, self._ends_with_parent = finalizes, ends_with_parent
        super().__init__([sys.executable, *map(str, arguments)], text=True, **options)

    def _execute_child(
        self,
        command: Sequence[Any],
        _executable: object,
        _preexec: object,
        _close_fds: object,
        _pass_fds: object,
        cwd: str | Path | None,
        environment: Mapping[str, str] | None,
        _startupinfo: object,
        _creationflags: object,
        _shell: object,
        *more: Any,
    ) -> None:
        """In place of fork and exec."""
        pipes, has_session = more[:6], more[-2]
        fds = [number if end == -1 else end for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        order = _Order(
            os.getpid(),
            [os.fspath(word) for word in command],
            str(Path.cwd() if cwd is None else cwd),
            dict(os.environ if environment is None else environment),
            has_session,
            self._finalizes,
            self._ends_with_parent,
        )
        ready, not_yet = os.pipe()
        try:
            self._teller, self.pid = fork_one(_become, (order,), [*fds, not_yet])
        finally:
            os.close(not_yet)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True
        with os.fdopen(ready) as pipe:
            pipe.read()

    def _internal_poll(self, _deadstate: object = None) -> int | None:
        """Its parent is another, who tells."""
        lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid and self.returncode is None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._teller], [], [], 0)[0]:
            return 0, 0
        told = self._teller.recv(8, socket.MSG_WAITALL)
        self._teller.close()
        return self.pid, int.from_bytes(told, sys.byteorder) if told else signal.SIGKILL


def use_warm_programs() -> None:
    """What this process starts of Python from now on comes from the warm process, too."""
    subprocess.Popen._execute_child = _execute_any  # type: ignore[attr-defined]


def use_cold_programs() -> None:
    """What this process starts is its child again, and has its limits."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


@contextlib.contextmanager
def warm_programs() -> Iterator[None]:
    """`use_warm_programs` until the end of the block."""
    before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    use_warm_programs()
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before  # type: ignore[attr-defined]


def _execute_any(process: subprocess.Popen[Any], *given: Any) -> None:
    """As a method of `subprocess.Popen`."""
    if _is_for_python(*given):
        process.__class__ = Program
        Program._execute_child(process, *given)  # type: ignore[arg-type]
    else:
        _execute_child(process, *given)


def _is_for_python(
    command: Any,
    executable: str | None,
    preexec: object,
    _close_fds: object,
    pass_fds: Sequence[int],
    _cwd: object,
    environment: Mapping[str, str] | None,
    _startupinfo: object,
    _creationflags: object,
    shell: bool,
    *more: Any,
) -> bool:
    """Whether it is a program of this Python, as a warm process can become one."""
    if isinstance(command, str | bytes) or executable or preexec or pass_fds or shell:
        return False
    is_other_user, in_group = more[7:11] != (None, None, None, -1), more[-1] != -1
    if is_other_user or in_group or command[0] != sys.executable:
        return False
    variables = os.environ if environment is None else environment
    wishes = {name for name in variables if name.startswith("PYTHON")} - _HEEDED - os.environ.keys()
    if wishes or variables.get(ADDRESS) is None or variables[ADDRESS] != os.environ.get(ADDRESS):
        return False
    return _program_of(command)[:1] in (["-c"], ["-m"]) or not str(_program_of(command)[0]).startswith("-")


def _program_of(command: Sequence[str]) -> list[str]:
    """Behind ``python`` and its options."""
    words = list(command[1:])
    return words[1:] if words[0] == "-u" else words


def run_program(
    *arguments: str | Path, timeout_seconds: float = 280.0, stdin: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run one to its end, as `subprocess.run` does with ``capture_output``."""
    pipe = subprocess.PIPE
    streams = {"stdin": subprocess.DEVNULL if stdin is None else pipe, "stdout": pipe, "stderr": pipe}
    with Program(*arguments, **streams | options) as program:
        try:
            output, errors = program.communicate(stdin, timeout=timeout_seconds)
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(program.args, program.returncode, output, errors)


# -- the process that is forked ------------------------------------------------------------------------------


def _become(fds: Sequence[int], order: _Order) -> NoReturn:
    """Run the program; SystemExit, or what it raised, is for the interpreter to end by."""
    *streams, not_yet = fds
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.set_inheritable(not_yet, False)
    os.closerange(3, not_yet)
    os.closerange(not_yet + 1, os.sysconf("SC_OPEN_MAX"))
    if order.has_session:
        os.setsid()
    if order.ends_with_parent:
        end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order.folder)
    try:
        rename_process(order.command, order.environment)
    except OSError:  # a system that does not let itself be told: as everywhere, then
        os.execve(sys.executable, order.command, order.environment)
    os.close(not_yet)  # from here on it is known by its name, and signals are the program's
    _take_over(order)
    try:
        _run(*_program_of(order.command))
    except SystemExit as end:
        if not order.finalizes and isinstance(end.code, int | None):
            _end(end.code or 0)
        raise
    except ImportError:  # the fork server would go on
        traceback.print_exc()
        sys.exit(1)
    if not order.finalizes:
        _end(0)
    sys.exit(0)


def _take_over(order: _Order) -> None:
    """What this process knows of the one it was forked from becomes what Python says at its start."""
    os.environ.clear()
    os.environ.update(order.environment)
    _open_streams("-u" in order.command[1:2] or bool(os.environ.get("PYTHONUNBUFFERED")))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *paths, *(path for path in sys.path if path not in ("", *paths))]
    own, kernel_says = os.getpid(), os.getppid

    def parent() -> int:
        if os.getpid() != own:
            return kernel_says()
        return order.parent if lives(order.parent) else 1

    os.getppid = parent
    # The fork server's frames lie below the program's. For each whose module is not known inspect.stack(),
    # which torchrun often calls, looks through all that there are.
    inspect.modulesbyfile.update({f"<frozen {name}>": name for name in _FROZEN}, **{"<string>": "__main__"})
    vars(multiprocessing.current_process()).pop("_inheriting", None)  # the fork server is at its imports
    child._popen = start_warm
    use_warm_programs()


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


def _end(status: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _open_streams(is_unbuffered: bool) -> None:
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(write_through=is_unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
