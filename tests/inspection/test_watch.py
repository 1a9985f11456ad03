"""`dcp.watch` and ``dcp watch``: committed steps, each acknowledged once by a consumer, also after kills."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import CheckpointConflictError, CheckpointFormatError
from tests.command_line.cli_support import begin_deletion, run
from tests.support.processes import lives
from tests.support.programs import Program
from tests.support.versions import save_version


def commit(root: Path, *steps: int) -> None:
    """Save a checkpoint for each step, in this order."""
    for step in steps:
        save_version(root / f"step-{step:08d}", step + 1, sync_files=False)


def given(root: Path, consumer: str = "default", **options: Any) -> list[int]:
    """Return the steps that a consumer gets now, all acknowledged."""
    with dcp.watch(root, consumer=consumer, once=True, **options) as steps:
        return [step.step for step in steps]


def change_cursor(root: Path, **fields: Any) -> dict[str, Any]:
    """Replace fields of the only cursor of a run atomically, and return the old fields."""
    (file,) = (root / ".watch").glob("*.cursor")
    before: dict[str, Any] = json.loads(file.read_bytes())
    (root / "cursor").write_text(json.dumps(before | fields))
    (root / "cursor").replace(file)
    return before


@contextmanager
def many_beats(root: Path) -> Iterator[None]:
    """Write a heartbeat of the holder to the cursor ten times a second."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            (file,) = (root / ".watch").glob("*.cursor")
            change_cursor(root, beat=json.loads(file.read_bytes())["beat"] + 1)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# -- steps ---------------------------------------------------------------------------------------------------


def test_every_consumer_gets_every_step_once(tmp_path: Path) -> None:
    """A consumer gets steps in order, also later commits of lower steps. Each consumer has its own cursor."""
    commit(tmp_path, 20, 10)
    assert given(tmp_path) == [10, 20]
    commit(tmp_path, 30, 5)
    assert given(tmp_path) == [5, 30]
    assert given(tmp_path) == []
    assert given(tmp_path, "other", since=20) == [20, 30]
    with dcp.watch(tmp_path, consumer="third", once=True) as steps:
        first = next(steps)
    assert (first.step, first.checkpoint_id) == (5, str(tmp_path / "step-00000005"))
    assert first.committed_seconds is not None
    assert given(tmp_path, "third") == [5, 10, 20, 30]


def test_uncommitted_steps_are_not_returned(tmp_path: Path) -> None:
    """Data without a manifest, a step under deletion and a damaged manifest are left out until a commit."""
    commit(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-00000001" / "manifest.msgpack").unlink()
    (tmp_path / "step-00000001" / ".metadata").unlink()
    begin_deletion(tmp_path / "step-00000002")
    (tmp_path / "step-00000003" / "manifest.msgpack").write_bytes(b"damaged")
    assert given(tmp_path) == [4]
    commit(tmp_path, 3, 1)
    assert given(tmp_path) == [1, 3]


def test_a_step_saved_again_is_returned_again(tmp_path: Path) -> None:
    """A step saved again is returned again, before or after the acknowledgement or a deletion."""
    commit(tmp_path, 1)
    with dcp.watch(tmp_path, once=True) as steps:
        first = next(steps)
        assert steps.is_committed(first)
        commit(tmp_path, 1)
        assert not steps.is_committed(first)
        second = next(steps)
        assert second.step == 1 and second.save_id != first.save_id
        assert list(steps) == []
    assert given(tmp_path) == []
    for path in (tmp_path / "step-00000001").iterdir():
        path.unlink()
    assert given(tmp_path) == []
    commit(tmp_path, 1)
    assert given(tmp_path) == [1]


def test_steps_deleted_after_listing_are_skipped(tmp_path: Path) -> None:
    """A step that is deleted after it was listed is skipped, so retention need not wait for consumers."""
    commit(tmp_path, 1, 2, 3)
    with dcp.watch(tmp_path, once=True) as steps:
        assert next(steps).step == 1
        for path in (tmp_path / "step-00000002").iterdir():
            path.unlink()
        assert [step.step for step in steps] == [3]


def test_separate_cursors_and_damaged_cursors(tmp_path: Path) -> None:
    """cursor= allows a read-only run. A damaged cursor is an error that says what to do."""
    commit(tmp_path / "run", 1)
    assert given(tmp_path / "run", cursor=tmp_path / "mine") == [1]
    assert not (tmp_path / "run" / ".watch").exists()
    (file,) = (tmp_path / "mine").iterdir()
    for damaged in (b"", b"{}", b"[1]", file.read_bytes()[:-20], b'{"kind": "dcphub.cursor", "version": 1}'):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointFormatError, match="delete the file to restart the consumer"):
            given(tmp_path / "run", cursor=tmp_path / "mine")
    assert [row["name"] for row in run("ls", tmp_path / "run", "--json").json] == ["step-00000001"]


# -- one process at a time -----------------------------------------------------------------------------------


def test_a_second_consumer_of_one_name_is_refused(tmp_path: Path) -> None:
    """A second process is refused while the first sends heartbeats, and gets steps after the first closed."""
    commit(tmp_path, 1, 2)
    with dcp.watch(tmp_path, once=True) as first:
        assert next(first).step == 1
        with (
            many_beats(tmp_path),
            dcp.watch(tmp_path, once=True) as second,
            pytest.raises(CheckpointConflictError, match="only one process can use"),
        ):
            next(second)
    assert given(tmp_path) == [1, 2]


@pytest.mark.exhaustive  # takes half a minute
def test_a_holder_without_heartbeats_loses_the_cursor(tmp_path: Path) -> None:
    """A holder on another machine without heartbeats loses the cursor, and can then acknowledge no step."""
    commit(tmp_path, 1, 2)
    first = dcp.watch(tmp_path, once=True)
    step = next(first)
    holder = change_cursor(tmp_path)["holder"]
    change_cursor(tmp_path, holder=holder | {"machine": "another", "token": "another"})
    with dcp.watch(tmp_path, once=True) as second:
        assert next(second).step == 1
        with pytest.raises(CheckpointConflictError, match="only one process can use"):
            step.acknowledge()
        assert [step.step for step in second] == [2]
    assert given(tmp_path) == []


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def begun() -> Iterator[list[Program]]:
    """Collect processes that a test starts, and kill them at the end."""
    processes: list[Program] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def begin(processes: list[Program], *arguments: str | Path) -> Program:
    """Start ``dcp watch`` in a separate process."""
    pipe = subprocess.PIPE
    process = Program("-m", "dcp", "watch", *arguments, stdout=pipe, stderr=pipe)
    processes.append(process)
    return process


def lines_of(log: Path, count: int) -> list[str]:
    """Wait until a file has a number of lines, and return the lines."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines() if log.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.02)
    raise AssertionError(f"{log} has not got {count} lines")


def test_watch_prints_a_line_for_each_step(tmp_path: Path) -> None:
    """Each line is a path, or JSON. --once ends with status 0, without output if no step is new."""
    commit(tmp_path, 1, 2)
    shown = run("watch", tmp_path, "--once")
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.splitlines() == [str(tmp_path / f"step-0000000{step}") for step in (1, 2)]
    assert run("watch", tmp_path, "--once").out == ""
    lines = run("watch", tmp_path, "--once", "--json", "--consumer", "b").out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2]
    facts = {"step", "checkpoint", "save_id", "committed_seconds", "metrics", "partial"}
    assert rows[0].keys() == facts


def test_watch_runs_a_command_for_each_step(tmp_path: Path, begun: list[Program]) -> None:
    """The command, run without a shell, gets the path for {} and in the environment; it writes to stderr."""
    root = tmp_path / "a run; with 'quotes'"
    commit(root, 1, 2)
    script = "import os, sys; print(sys.argv[1] == os.environ['DCP_CHECKPOINT'], os.environ['DCP_STEP'])"
    process = begin(begun, root, "--once", "--json", "--exec", f'{sys.executable} -S -c "{script}" {{}}')
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [(row["step"], row["exit"]) for row in map(json.loads, out.splitlines())] == [(1, 0), (2, 0)]
    assert err.splitlines() == ["True 1", "True 2"]


def test_a_failed_command_ends_watch(tmp_path: Path) -> None:
    """After the given number of tries the status is 1, and the next watch begins with the same step."""
    commit(tmp_path / "run", 1, 2)
    log = tmp_path / "log"
    failing = f"sh -c 'echo $DCP_STEP >> {log}; test -e {tmp_path}/fixed'"
    ended = run("watch", tmp_path / "run", "--once", "--exec", failing, "--tries", "2", "--interval", "0.05")
    assert ended.status == 1
    assert "ended with status 1 (try 2 of 2)" in ended.err
    (tmp_path / "fixed").touch()
    assert run("watch", tmp_path / "run", "--once", "--exec", failing).status == 0
    assert log.read_text().split() == ["1", "1", "1", "2"]
    missing = run("watch", tmp_path / "run", "--once", "--exec", "/no/such", "--consumer", "b")
    assert (missing.status, "/no/such" in missing.err) == (3, True)


def test_watch_killed_during_a_command(tmp_path: Path, begun: list[Program]) -> None:
    """After a kill the next watch starts at once with the step of the running command, not an earlier one.
    The old command is ended."""
    root, log = tmp_path / "run", tmp_path / "log"
    commit(root, 1, 2)
    command = f"sh -c 'echo $DCP_STEP $$ >> {log}; test $DCP_STEP = 1 || exec sleep 600'"
    watcher = begin(begun, root, "--exec", command, "--interval", "0.1")
    pid = int(lines_of(log, 2)[1].split()[1])
    with many_beats(root):
        refused = run("watch", root, "--once")
    assert (refused.status, "only one process can use" in refused.err) == (3, True)
    watcher.kill()
    watcher.wait(60)
    ended = run("watch", root, "--once", "--exec", f"sh -c 'echo $DCP_STEP >> {log}'")
    assert ended.status == 0, ended.err
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["1", "2", "2"]
    deadline = time.monotonic() + 60
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_watch(tmp_path: Path, begun: list[Program], number: int) -> None:
    """A signal ends a waiting or working watch and its command, and releases the cursor."""
    root, log = tmp_path / "run", tmp_path / "log"
    commit(root, 1)
    waiting = begin(begun, root, "--consumer", "waiting", "--interval", "300")
    working = begin(begun, root, "--exec", f"sh -c 'echo x >> {log}; exec sleep 600'")
    lines_of(log, 1)
    assert waiting.stdout is not None
    assert waiting.stdout.readline()
    for process in (waiting, working):
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert "Traceback" not in err
    assert all(json.loads(path.read_bytes())["holder"] is None for path in (root / ".watch").glob("*.cursor"))
    assert given(root) == [1]
