"""Python programs of tests that come from a process which has torch imported: to start one costs no seconds.

They are run as by ``python -c`` and ``python -m``: with a ``__main__``, arguments, folder, environment and
files of their own. A test that is about what a program imports, or about its start, has to use `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from dcp.background.process import child
from tests.support.processes import parent_of
from tests.support.warm_writers import fork_one, start_warm

__all__ = ["Program", "run_program"]

_PR_SET_CHILD_SUBREAPER: Final = 36
_ADOPTION_SECONDS: Final = 240.0


class Program(subprocess.Popen[str]):
    """`subprocess.Popen`, of what follows ``python`` on a command line: ``-c``, ``-m`` or a file, arguments.

    Where nothing else is said, its output is that of this process. Only for the process of the tests, which
    becomes its parent. It ends once its threads and exit handlers have; only with ``finalizes`` does it take
    the time to end its interpreter, which has all of torch to let go.
    """

    def __init__(self, *arguments: str | Path, finalizes: bool = False, **options: Any) -> None:
        self._finalizes = finalizes
        super().__init__([sys.executable, *map(str, arguments)], text=True, **options)

    def _execute_child(
        self,
        command: Sequence[str],
        _executable: object,
        _preexec: object,
        _close_fds: object,
        _pass_fds: object,
        cwd: str | Path | None,
        environment: Mapping[str, str] | None,
        _startupinfo: object,
        _creationflags: object,
        _shell: object,
        *pipes_and_ids: Any,
    ) -> None:
        """In place of fork and exec."""
        pipes = pipes_and_ids[:6]
        fds = [number if end == -1 else end for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        folder = str(Path.cwd() if cwd is None else cwd)
        everything = dict(os.environ if environment is None else environment)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what the process leaves behind that forks it is ours
        try:
            order = (os.getpid(), list(command[1:]), folder, everything, self._finalizes)
            self.pid = fork_one(_become, order, fds)
            _wait_for_adoption(self.pid)
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True


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


def _wait_for_adoption(pid: int) -> None:
    give_up = time.monotonic() + _ADOPTION_SECONDS
    while parent_of(pid) != os.getpid():
        if time.monotonic() > give_up:
            raise AssertionError(f"process {pid} did not become this process's child")
        time.sleep(0.001)


# -- the process that is forked ------------------------------------------------------------------------------


def _become(
    fds: Sequence[int],
    parent: int,
    arguments: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    finalizes: bool,
) -> NoReturn:
    """Run the program; SystemExit, or what it raised, is for the interpreter to end by."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _open_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    child._popen = start_warm
    while os.getppid() not in (parent, 1):  # what has forked this process is about to end
        time.sleep(0.001)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *paths, *(path for path in sys.path if path not in ("", *paths))]
    try:
        _run(*arguments)
    except SystemExit as end:
        if not finalizes and isinstance(end.code, int | None):
            _end(end.code or 0)
        raise
    except ImportError:  # the fork server would go on
        traceback.print_exc()
        sys.exit(1)
    if not finalizes:
        _end(0)
    sys.exit(0)


def _run(kind: str, *rest: str) -> None:
    if kind == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = [kind, *rest[kind == "-c" :]]
    text, name = (rest[0], "<string>") if kind == "-c" else (Path(kind).read_text(), kind)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(text, name, "exec"), main.__dict__)


def _end(status: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _open_streams() -> None:
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
