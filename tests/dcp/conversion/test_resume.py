"""Conversions that are killed: no file under the target's name, what is done is not done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.conversion.run import convert
from dcp.progress import Progress
from dcp.storage.errors import CheckpointConflictError
from tests.support.conversion import assert_same, folder_of
from tests.support.programs import Program, run_program

_MEBIBYTE = 1 << 20
_TENSORS = 5
_SIZE = 3 * _MEBIBYTE
_TASK = 4 * _MEBIBYTE

_REPLACING = """
import os, signal, sys
from dcp.conversion.run import convert
from dcp.conversion.copying.sinks import observers
def observe(op, name):
    if op == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
observers.append(observe)
convert(sys.argv[1], sys.argv[2], to="safetensors", executor="inline", overwrite=True)
"""

_PROGRAM = """
import json, os, signal, sys
from dcp.conversion.copying import tasks
tasks.TASK_BYTES = 4 << 20  # several tasks without much to write
from dcp.conversion.run import convert
from dcp.conversion.copying.sinks import observers
source, target, to, kill_at = sys.argv[1:5]
steps = []
def observe(op, name):
    steps.append(op)
    if len(steps) == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
observers.append(observe)
options = json.loads(sys.argv[5])
report = convert(source, target, to=to, executor="inline", **options)
print(len(steps), report.tasks, report.tasks_resumed, report.bytes_read, *steps)
"""

_TARGETS = {"torch": "model.pt", "safetensors": "folder", "dcp": "copy"}


def _run(
    source: Path, target: Path, to: str, kill_at: int, **options: object
) -> subprocess.CompletedProcess[str]:
    return run_program("-c", _PROGRAM, source, target, to, str(kill_at), json.dumps(options))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 MiB: four tasks."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    state = {f"t{n}": torch.full((_SIZE // 4,), float(n)) for n in range(_TENSORS)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What the program says of a run to a format that nobody kills."""

    @cache
    def said(to: str) -> list[str]:
        run = _run(source, tmp_path_factory.mktemp("whole") / _TARGETS[to], to, 0)
        assert run.returncode == 0, run.stderr
        return run.stdout.split()

    return said


def _check(target: Path) -> None:
    if target.suffix == ".pt":
        loaded = torch.load(target, weights_only=True, mmap=True)
        assert all(bool((loaded[f"t{n}"] == n).all()) for n in range(_TENSORS))
        return
    convert(target, target.with_name("check.pt"), to="torch", executor="inline")
    _check(target.with_name("check.pt"))
    target.with_name("check.pt").unlink()


def test_no_torch_is_needed(source: Path, tmp_path: Path) -> None:
    """In an interpreter that cannot import it."""
    program = "import sys; sys.modules['torch'] = None\nfrom dcp.conversion.run import convert\n"
    for to, name in _TARGETS.items():
        target = str(tmp_path / name)
        program += f"convert({str(source)!r}, {target!r}, to={to!r}, executor='inline')\n"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    for name in _TARGETS.values():
        _check(tmp_path / name)


@pytest.mark.parametrize("to", list(_TARGETS))
def test_killed_anywhere_and_finished(
    to: str, source: Path, whole: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """Killed again and again, each time a few steps later, it ends with the same bytes as without.

    At no death is there anything under the target's name before all of it is there, and each run goes on
    where the one before was: all together read the source once.
    """
    target = tmp_path / _TARGETS[to]
    _, all_tasks, _, all_bytes = map(int, whole(to)[:4])
    steps = whole(to)[4:]
    assert all_tasks >= 4
    for deaths, kill_at in enumerate(range(2, 2 * len(steps), 5)):
        run = _run(source, target, to, kill_at)
        if run.returncode == 0:
            assert deaths > 2
            break
        assert run.returncode == -signal.SIGKILL, run.stderr
        names = [name for name in folder_of(target) if not name.startswith(".tmp-convert-")]
        assert names in ([], [target.name])
        if target.name in names:  # it was killed while cleaning up
            break
    else:
        raise AssertionError("it never ended")
    if run.returncode == 0:
        _, tasks, done, read = map(int, run.stdout.split()[:4])
        assert tasks == all_tasks
        assert 0 < done <= tasks
        assert read <= all_bytes * (tasks - done + 1) / tasks
    _check(target)


@pytest.mark.parametrize("to", list(_TARGETS))
def test_what_a_killed_run_has_published_is_its_own(
    to: str, source: Path, whole: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """Killed when the target has its name, and called again, it takes that for what it has made, reads
    nothing, and clears up; called once more it compares, and with resume=False it is refused."""
    target = tmp_path / _TARGETS[to]
    steps = whole(to)[4:]
    assert _run(source, target, to, steps.index("remove") + 1).returncode == -signal.SIGKILL
    assert target.exists()
    again = _run(source, target, to, 0)
    assert again.returncode == 0, again.stderr
    _, tasks, done, read = map(int, again.stdout.split()[:4])
    assert (done, read) == (tasks, 0)
    assert folder_of(target) == [target.name]
    _check(target)
    compared = convert(source, target, to=to, executor="inline")
    assert compared.tasks_resumed == compared.tasks
    with pytest.raises(CheckpointConflictError, match="exists; give another target"):
        convert(source, target, to=to, executor="inline", resume=False)


def test_another_target_in_place_of_a_killed_runs_is_refused_at_once(
    source: Path, whole: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """Before anything is read; without it the run goes on where it was."""
    target = tmp_path / "folder"
    steps = whole("safetensors")[4:]
    kill_at = [number for number, step in enumerate(steps, 1) if step == "ledger"][2] + 1
    assert _run(source, target, "safetensors", kill_at).returncode == -signal.SIGKILL
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"")
    refused = _run(source, target, "safetensors", -1)
    assert "exists; give another target" in refused.stderr
    (target / "model.safetensors").unlink()
    assert _run(source, target, "safetensors", 0).stdout.split()[1:3] == ["4", "3"]
    _check(target)


def test_what_is_done_is_never_read_again(
    source: Path, whole: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """Bytes read before the death and after it are together those of one whole run."""
    target = tmp_path / "model.pt"
    steps = whole("torch")[4:]
    kill_at = [number for number, step in enumerate(steps, 1) if step == "ledger"][2] + 1
    assert _run(source, target, "torch", kill_at).returncode == -signal.SIGKILL
    _, tasks, done, read = map(int, _run(source, target, "torch", 0).stdout.split()[:4])
    assert (tasks, done) == (4, 3)
    assert read == pytest.approx(_TENSORS * _SIZE - 3 * _TASK, abs=4096)
    _check(target)
    assert folder_of(target) == ["model.pt"]


def test_a_changed_source_or_option_begins_anew(
    source: Path, whole: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """What was done for other bytes is thrown away, and so is everything with resume=False."""
    target = tmp_path / "model.pt"
    steps = whole("torch")[4:]
    kill_at = [number for number, step in enumerate(steps, 1) if step == "ledger"][1] + 1
    changes: list[dict[str, object]] = [
        {"only": ["t0", "t1", "t2"]},
        {"resume": False},
        {"dtype": "bfloat16"},
    ]
    for change in changes:
        assert _run(source, target, "torch", kill_at).returncode == -signal.SIGKILL
        assert _run(source, target, "torch", 0, **change).stdout.split()[2] == "0"
        assert folder_of(target) == ["model.pt"]
        target.unlink()
    assert _run(source, target, "torch", kill_at).returncode == -signal.SIGKILL
    data_file = next(path for path in source.iterdir() if path.suffix == ".distcp")
    stamp = data_file.stat()
    os.utime(data_file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1_000_000_000))
    assert _run(source, target, "torch", 0).stdout.split()[2] == "0"


def test_a_killed_replacement_leaves_the_old_target(
    source: Path, whole: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """With overwrite, too: until the one step, the old file is what is there."""
    target = tmp_path / "model.pt"
    torch.save({"old": torch.ones(1)}, target)
    steps = whole("torch")[4:]
    publish = steps.index("publish") + 1
    assert _run(source, target, "torch", publish, overwrite=True).returncode == -signal.SIGKILL
    assert_same(torch.load(target, weights_only=True), {"old": torch.ones(1)})
    run = _run(source, target, "torch", 0, overwrite=True)
    assert run.returncode == 0, run.stderr
    _, tasks, done, read = map(int, run.stdout.split()[:4])
    assert (done, read) == (tasks, 0)
    _check(target)


def test_two_at_once_are_told_apart(source: Path, tmp_path: Path) -> None:
    """The second one to the same target is refused while the first is at it."""
    target = tmp_path / "model.pt"
    program = _PROGRAM.replace(
        "os.kill(os.getpid(), signal.SIGKILL)", "print('here', flush=True); sys.stdin.read()"
    )
    command = ["-c", program, str(source), str(target), "torch", "4", "{}"]
    first = Program(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert first.stdout is not None
        assert first.stdout.readline().strip() == "here"
        with pytest.raises(CheckpointConflictError, match="another process"):
            convert(source, target, to="torch", executor="inline")
    finally:
        first.communicate(timeout=120)
    assert first.returncode == 0
    _check(target)


@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_a_source_replaced_meanwhile_is_not_mixed(
    verify: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no checksum would tell, a source whose files were replaced after some were read is refused, and
    nothing of it is published or resumed; converted again it is the new one."""
    monkeypatch.setattr("dcp.conversion.copying.tasks.TASK_BYTES", 4 << 20)
    for version in (1, 2):
        state = {f"t{n}": torch.full((1 << 20,), version, dtype=torch.int32) for n in range(2)}
        dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
        convert(
            tmp_path / "saved",
            tmp_path / f"model-{version}",
            to="safetensors",
            shard_bytes=5 << 20,
            executor="inline",
        )
    source, target = tmp_path / "model-1", tmp_path / "model.safetensors"

    def replace(_: Progress) -> None:
        for file in (tmp_path / "model-2").glob("*.safetensors"):
            file.rename(source / file.name)

    with pytest.raises(CheckpointConflictError, match="has changed while it was converted"):
        convert(source, target, to="safetensors", executor="inline", verify=verify, progress=replace)
    assert not target.exists()
    report = convert(source, target, to="safetensors", executor="inline", verify=verify)
    assert report.tasks_resumed == 0
    loaded = {f"t{n}": torch.zeros(1 << 20, dtype=torch.int32) for n in range(2)}
    dcp.load(loaded, checkpoint_id=target, no_dist=True)
    assert all(bool((tensor == 2).all()) for tensor in loaded.values())


@pytest.mark.parametrize("kill_at", ["forget", "exchanged"])
def test_what_was_replaced_does_not_come_back(kill_at: str, tmp_path: Path) -> None:
    """Killed right before or after a folder takes the place of one with files of the same names and sizes,
    and called again, it does not take the old ones for what it had written; a file of the user's stays."""
    for version in (1, 2):
        state = {"w": torch.full((1000,), version, dtype=torch.int32)}
        dcp.save(state, checkpoint_id=tmp_path / str(version), no_dist=True)
    convert(tmp_path / "1", tmp_path / "target", to="safetensors", executor="inline")
    (tmp_path / "target" / "config.json").write_text("{}")
    replacing = run_program("-c", _REPLACING, tmp_path / "2", tmp_path / "target", kill_at)
    assert replacing.returncode == -signal.SIGKILL, replacing.stderr

    def loaded() -> set[int]:
        state = {"w": torch.zeros(1000, dtype=torch.int32)}
        dcp.load(state, checkpoint_id=tmp_path / "target", no_dist=True)
        return set(state["w"].tolist())

    assert loaded() == {1 if kill_at == "forget" else 2}
    convert(tmp_path / "2", tmp_path / "target", to="safetensors", executor="inline", overwrite=True)
    assert loaded() == {2}
    assert (tmp_path / "target" / "config.json").read_text() == "{}"
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.pt", {"to": "torch"}),
        ("x.safetensors", {"to": "safetensors", "only": "m", "dtype": "float16"}),
        ("folder", {"to": "safetensors", "only": "m"}),
        ("dcp", {"to": "dcp", "only": "m", "rename": {"^m": "n"}}),
        ("memory://resume-finished/dcp", {"to": "dcp"}),
    ],
)
def test_one_that_was_finished_is_compared(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Run again it is done, and writes nothing; what is not its result, by options or a bit, is refused."""
    for which, number in (("a", 1.0), ("b", 2.0)):
        state = {"m": {"w": torch.full((10, 3), number), "v": torch.ones(2)}, "step": 3, "none": {}}
        dcp.save(state, checkpoint_id=tmp_path / which)
    target = name if "://" in name else str(tmp_path / name)
    first = dcp.convert(tmp_path / "a", target, **options)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = dcp.convert(tmp_path / "a", target, **options)
    assert (again.tasks_resumed, again.files) == (again.tasks, first.files)
    assert (first.tasks_resumed, again.checksums) == (0, first.checksums)
    for source, changed in (("b", {}), ("a", {"exclude": "m.v"}), ("a", {"resume": False})):
        with pytest.raises(CheckpointConflictError, match="exists"):
            dcp.convert(tmp_path / source, target, **options | changed)
    if "://" not in target:
        (written,) = [path for path in tmp_path.rglob(first.files[0]) if path.parent.name not in "ab"]
        data = written.read_bytes()
        at = data.index(torch.ones(2, dtype=torch.float16 if "dtype" in options else None).numpy().tobytes())
        written.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
        with pytest.raises(CheckpointConflictError, match="exists"):
            dcp.convert(tmp_path / "a", target, **options)
        written.write_bytes(data)
        files.pop(written)
    assert all(path.stat().st_mtime_ns == when for path, when in files.items())
