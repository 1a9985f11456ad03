"""Test harness: programs, fork server, shared servers, shards and summary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from sqlalchemy import make_url

from tests.support.crashes import wait_for_end
from tests.support.forking import PRELOADED, forkserver_context
from tests.support.processes import command_of, environment_of
from tests.support.programs import Program, run_program
from tests.support.service import wait_until

_ROOT = Path(__file__).parents[2]


def test_forked_programs_have_signals_and_command_lines(tmp_path: Path) -> None:
    """A forked program receives signals, and the system shows its command line and environment."""
    assert "usage" in run_program("-m", "json.tool", "--help").stdout
    (tmp_path / "script.py").write_text("import signal, sys; print(sys.argv, flush=True); signal.pause()")
    with Program("script.py", "a", cwd=tmp_path, env={"SAID": "so"}, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "['script.py', 'a']\n"
        assert command_of(program.pid).split() == [sys.executable, "script.py", "a"]
        assert environment_of(program.pid) == b"SAID=so\0"
        assert program.poll() is None
        program.terminate()
    assert program.returncode == -signal.SIGTERM


def test_the_fork_server_has_imported_all_modules() -> None:
    """The fork server has imported all preloaded modules, so no process imports torch itself."""
    look = f"import sys; sys.exit(', '.join(set({PRELOADED}) - set(sys.modules)) or 0)"
    process = forkserver_context().Process(target=exec, args=(look,))
    process.start()
    process.join()
    assert process.exitcode == 0


_RUN = """
import subprocess, signal
from tests.support.programs import Program
print(Program("-c", "import signal; signal.pause()", stdout=subprocess.DEVNULL).pid, flush=True)
signal.pause()
"""


@pytest.mark.exhaustive
def test_programs_end_with_a_run_that_is_killed() -> None:
    """The fork server and its programs end with the process that started them."""
    with subprocess.Popen([sys.executable, "-c", _RUN], cwd=_ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        run.kill()
    wait_for_end(pid)


_SERVED = """
import json, pathlib, sys
from tests.support.shared_servers import shared_server

class Folders:
    def getbasetemp(self):
        return pathlib.Path(sys.argv[2])

for _ in range(2):
    address = shared_server(sys.argv[1], Folders(), lambda address: print("prepared", flush=True))
    print(json.dumps(address), flush=True)
sys.stdin.read()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=str)
@pytest.mark.parametrize("name", ["postgres", "s3"])
def test_a_shared_server_is_started_once_and_ends_with_the_run(
    tmp_path: Path, name: str, number: signal.Signals
) -> None:
    """After a run that is killed or interrupted, no process and no folder is left."""
    mark = uuid.uuid4().hex
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_XDIST_WORKER"}

    def marked() -> list[int]:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [pid for pid in pids if f"DCP_TEST_RUN={mark}".encode() in environment_of(pid).split(b"\0")]

    with subprocess.Popen(
        [sys.executable, "-c", _SERVED, name, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"DCP_TEST_RUN": mark},
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "prepared\n"
        address, again = (json.loads(run.stdout.readline()) for _ in range(2))
        assert address == again
        folder = Path(address["folder"] if name == "s3" else str(make_url(address["url"]).query["host"]))
        assert folder.is_dir() and len(marked()) >= 3
        run.send_signal(number)
    wait_until(lambda: not marked(), "no process left", 60)
    assert not folder.exists()


_TESTS = """
from hypothesis import given, settings, strategies
import pytest
@pytest.mark.parametrize("name", ["a b", "c"])
def test_fails(name):
    assert name == "c"
@settings(print_blob=True)
@given(strategies.integers())
def test_property(number):
    assert number < 100
"""


def test_the_summary_has_a_command_for_each_failure(tmp_path: Path) -> None:
    """The summary has a command for each failure, hypothesis's blob and the memory; shards split files."""
    (tmp_path / "test_it.py").write_text(_TESTS)
    plugins = ("tests.support.shards", "tests.support.summary", "hypothesispytest")
    given = [*(f"-p{name}" for name in plugins), "-pno:cacheprovider", "test_it.py"]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    runs = [
        run_program("-m", "pytest", *given, f"--shard={shard}", cwd=tmp_path, env=alone)
        for shard in ("1/2", "2/2", "3/2")
    ]
    outputs = [run.stdout for run in runs]
    assert ".venv/bin/python -m pytest -n0 'test_it.py::test_fails[a b]'" in outputs[0]
    assert "test_it.py::test_property  # with @reproduce_failure(" in outputs[0]
    assert "most memory of a process of tests: " in outputs[0]
    assert "3 deselected" in outputs[1]
    assert "3/2: write 1/4 for the first of four" in runs[2].stderr
