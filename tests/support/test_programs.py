"""Programs that are forked from a warm process are as those that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import command_of, environment_of
from tests.support.programs import Program, run_program

_TOLD = """
import atexit, os, sys, threading, time
class Last:
    def __del__(self, write=os.write):
        write(1, b"let go\\n")
last = Last()
atexit.register(os.write, 1, b"exit handler\\n")
threading.Thread(target=lambda: (time.sleep(0.1), os.write(1, b"thread\\n"))).start()
said = __name__, sys.argv, os.getppid(), os.getcwd(), sys.stdin.read(), os.environ["SAID"], len(os.environ)
print(*said, flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize("finalizes", [False, True])
def test_it_has_what_it_is_given_and_ends_as_python_does(tmp_path: Path, finalizes: bool) -> None:
    """Arguments, folder, input, environment and parent; threads, exit handlers, and what modules hold."""
    ended = run_program("-c", _TOLD, "a", stdin="in", env={"SAID": "so"}, cwd=tmp_path, finalizes=finalizes)
    first, *rest = ended.stdout.splitlines()
    lines = ["thread", "exit handler", *(["let go"] if finalizes else [])]
    said = f"__main__ ['-c', 'a'] {os.getpid()} {tmp_path} in so 1"
    assert sorted([first, *rest]) == sorted([said, *lines])
    assert rest[-1] == lines[-1]
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("pass", 0, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 2)", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_its_status_is_that_of_python(text: str, status: int, error: str) -> None:
    """With what it has raised as the last line of its traceback."""
    ended = run_program("-c", text)
    assert ended.returncode == status
    assert ended.stderr.endswith(error)
    assert bool(ended.stderr) == bool(error)


def test_modules_and_files(tmp_path: Path) -> None:
    """As ``python -m`` and ``python FILE``; a signal ends it."""
    assert "usage" in run_program("-m", "json.tool", "--help").stdout
    (tmp_path / "script.py").write_text("import signal, sys; print(sys.argv, flush=True); signal.pause()")
    with Program("script.py", "a", cwd=tmp_path, stdout=-1) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "['script.py', 'a']\n"
        program.terminate()
    assert program.returncode == -signal.SIGTERM


def test_the_system_knows_it_by_its_own_name() -> None:
    """Command line and environment; and the signal that it wants when the tests end."""
    with Program("-c", "input()", env={"SAID": "so"}, stdin=subprocess.PIPE) as program:
        assert command_of(program.pid).split() == [sys.executable, "-c", "input()"]
        assert environment_of(program.pid) == b"SAID=so\0"
        assert program.poll() is None
        program.communicate("\n")
    assert program.returncode == 0
    told = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)"
    assert run_program("-c", told).stdout == "0\n"
    assert run_program("-c", told, ends_with_parent=True).stdout == f"{signal.SIGTERM:d}\n"


_STARTING = """
import os, subprocess, sys
said = "import os, sys; print('torch' in sys.modules, os.getppid()); sys.exit(7)"
for options in ([], ["-u"], ["-S"]):
    done = subprocess.run([sys.executable, *options, "-c", said], stdout=subprocess.PIPE, text=True)
    warm, parent = done.stdout.split()
    print(warm, int(parent) == os.getpid(), done.returncode)
other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
assert other.poll() is None and os.getsid(other.pid) == other.pid != os.getsid(0)
other.kill()
print(other.wait(60))
"""


def test_what_it_starts_of_python_imports_as_little() -> None:
    """It comes from the warm process too, unless it wants an interpreter of another kind."""
    done = run_program("-c", _STARTING)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True True 7", "True True 7", "False True 7", "-9"]
