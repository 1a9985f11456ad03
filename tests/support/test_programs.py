"""Programs that are forked from a warm process are as those that Python starts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

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
