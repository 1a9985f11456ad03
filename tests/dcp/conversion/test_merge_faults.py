"""What fails in the middle of a merge: a source that changes, a full disk, a kill at any step, also under a
map and where something is replaced. Nothing half made has the target's name, and the next run ends it."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp
from dcp.conversion.copying import tasks
from dcp.progress import Progress
from dcp.storage.errors import CheckpointConflictError
from tests.dcp.conversion.test_merge import names_in
from tests.support.programs import run_program

_COUNT = 4
_MAP = {
    "rules": [{"from": {"t{n}": "(rows columns)"}, "to": {"w.{n}": "columns rows"}}],
    "sizes": {"rows": 4},
}


def write(folder: Path, value: float, number: int = 0) -> Path:
    """A source of 4 MiB, all of one value."""
    path = folder / f"{number}.safetensors"
    save_file({f"t{n}": torch.full((1 << 18,), value) for n in range(_COUNT)}, path)
    return path


def values(target: Path) -> set[float]:
    """That are in it, by whatever names."""
    found = load_file(target)
    assert len(found) == _COUNT
    return {one for tensor in found.values() for one in tensor.flatten().tolist()}


@pytest.mark.parametrize("verify", ["blocks", pytest.param("none", marks=pytest.mark.exhaustive)])
def test_a_source_that_changes_meanwhile_is_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Any
) -> None:
    """The merge is refused, nothing of it is published or gone on with; the next one is of the new source."""
    monkeypatch.setattr(tasks, "TASK_BYTES", 1 << 20)
    other = tmp_path / "other"
    other.mkdir()
    sources = [write(tmp_path, float(number), number) for number in range(2)]
    new = write(other, 10.0, 1)
    os.utime(new, (1, 1))  # files that are written right after one another may have one time
    target, before = tmp_path / "out.safetensors", names_in(tmp_path)
    chosen: dict[str, Any] = {"weights": [1.0, 0.5], "executor": "inline", "verify": verify}

    def replace(_: Progress) -> None:
        if new.exists():
            new.rename(sources[1])

    with pytest.raises(CheckpointConflictError, match="has changed while it was converted"):
        dcp.merge(sources, target, progress=replace, **chosen)
    assert names_in(tmp_path) == before
    report = dcp.merge(sources, target, **chosen)
    assert report.tasks > 1 and report.tasks_resumed == 0
    assert values(target) == {5.0}


_LIMITED = """
import json, resource, sys
from dcp.conversion.merge import merge
from dcp.storage.errors import StorageError
*sources, target, options = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    merge(sources, target, **json.loads(options))
except StorageError as error:
    print(error.errno)
"""


@pytest.mark.parametrize(
    "to", ["safetensors", *(pytest.param(to, marks=pytest.mark.exhaustive) for to in ("dcp", "torch"))]
)
def test_where_there_is_no_room_nothing_stays(tmp_path: Path, to: str) -> None:
    """A typed error, before the sources are read; then, with room, the same call does it."""
    sources = [write(tmp_path, float(number), number) for number in range(2)]
    target = tmp_path / {"safetensors": "out.safetensors", "dcp": "out", "torch": "out.pt"}[to]
    before = names_in(tmp_path)
    options: dict[str, Any] = {"to": to, "executor": "inline", "map": _MAP}
    done = run_program("-c", _LIMITED, *sources, target, json.dumps(options))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == errno.EFBIG
    assert names_in(tmp_path) == before
    dcp.merge(sources, target, **options)
    assert {value for tensor in dcp.read(target).values() for value in tensor.flatten().tolist()} == {0.5}


_KILLED = """
import json, os, signal, sys
from dcp.conversion.copying import tasks
tasks.TASK_BYTES = 1 << 20
from dcp.conversion.copying.sinks import observers
from dcp.conversion.merge import merge
*sources, target, kill_at, options = sys.argv[1:]
steps = []
def observe(op, name):
    steps.append(op)
    if len(steps) == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
observers.append(observe)
report = merge(sources, target, executor="inline", **json.loads(options))
print(len(steps), report.tasks_resumed)
"""


def _steps(sources: list[Path], target: Path, options: dict[str, Any]) -> int:
    done = run_program("-c", _KILLED, *sources, target, "0", json.dumps(options))
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[0])


def _kill(sources: list[Path], target: Path, at: int, options: dict[str, Any]) -> None:
    died = run_program("-c", _KILLED, *sources, target, str(at), json.dumps(options))
    assert died.returncode == -signal.SIGKILL, died.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_there", [False, True])
def test_killed_at_each_step(tmp_path: Path, is_there: bool) -> None:
    """Under a map. Where something is replaced that is whole until the new one is, and a merge that is called
    again, whatever was left, ends; it leaves nothing else."""
    sources = [write(tmp_path, float(number), number) for number in range(2)]
    options: dict[str, Any] = {"map": _MAP, "overwrite": is_there}
    count = _steps(sources, tmp_path / "whole.safetensors", options)
    whole = (tmp_path / "whole.safetensors").read_bytes()
    assert count > 10
    for at in range(1, count + 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        target = folder / "out.safetensors"
        if is_there:
            save_file({f"t{n}": torch.full((3,), 7.0) for n in range(_COUNT)}, target)
        _kill(sources, target, at, options)
        if target.exists() and target.read_bytes() != whole:
            assert is_there and values(target) == {7.0}
        if not target.exists() or is_there:
            _steps(sources, target, options)
            assert names_in(folder) == ["out.safetensors"]
        assert target.read_bytes() == whole
