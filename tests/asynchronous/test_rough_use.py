"""Asynchronous saves in programs that change the working directory, are interrupted, or fork."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.support.background import FileGate, gated_writer
from tests.support.crashes import in_lab
from tests.support.programs import run_program

THREAD, PROCESS = dcp.AsyncCheckpointerType.THREAD, dcp.AsyncCheckpointerType.PROCESS


def state_of(version: int) -> dict[str, Any]:
    """Return a state with a tensor and a number that show the version."""
    return {"w": torch.full((1000,), float(version)), "version": version}


def version_of(folder: Path) -> int:
    """Return the version in a checkpoint."""
    found = dcp.read(folder)
    assert found["w"].eq(found["version"]).all()
    return int(found["version"])


@pytest.mark.parametrize("kind", [THREAD, pytest.param(PROCESS, marks=pytest.mark.exhaustive)])
def test_a_relative_id_is_resolved_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dcp.AsyncCheckpointerType
) -> None:
    """A relative checkpoint_id is resolved when the save is called, although a later chdir precedes the
    write. The metadata of the result is read from the same folder."""
    here, elsewhere, gate = tmp_path / "here", tmp_path / "elsewhere", FileGate(tmp_path / "gate")
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    save = partial(dcp.async_save, no_dist=True, async_checkpointer_type=kind)
    save(state_of(1), storage_writer=gated_writer(tmp_path / "first", gate))
    second = save(state_of(2), checkpoint_id="second")
    monkeypatch.chdir(elsewhere)
    gate.open()
    assert set(second.result(240).state_dict_metadata) == {"w", "version"}
    assert version_of(here / "second") == 2
    assert not list(elsewhere.iterdir())


# -- interrupts ----------------------------------------------------------------------------------------------

_INTERRUPTED = """
import sys, time, torch, dcp
from dcp.storage.stores.posix.store import PosixStore
class Interrupted:
    def state_dict(self):
        raise KeyboardInterrupt
    def load_state_dict(self, state_dict):
        pass
save = lambda name, state: dcp.async_save(state, checkpoint_id=f"{sys.argv[1]}/{name}", no_dist=True,
                                          async_checkpointer_type=dcp.AsyncCheckpointerType[sys.argv[2]])
try:
    save("a", {"s": Interrupted()})
except KeyboardInterrupt:
    run, mode = f"{sys.argv[1]}/run", sys.argv[2].lower()
    manager = dcp.CheckpointManager(run, mode=mode, keep=dcp.Retention(last=1))
    for step in (1, 2):
        manager.save(step, {"w": torch.full((64,), step)})
    large = torch.arange(1 << 24, dtype=torch.int32)  # under way when the script ends
    futures = [save(str(number), {"w": large}) for number in range(2)]
    manager.save(3, {"w": torch.full((64,), 3)})
    hang = lambda step, name: time.sleep(900 * (step.endswith("write") and name.endswith(".distcp")))
    writer = lambda at: dcp.FileSystemWriter(at, open_store=lambda path: PosixStore(path, hang))
    dcp.CheckpointManager(f"{run}-hangs", timeout_seconds=1, writer=writer).save(1, {"w": large})
    raise SystemExit(3)
"""


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_interpreter_exit_waits_for_saves(tmp_path: Path, kind: str) -> None:
    """Interpreter exit waits for commits, a manager's too and after Ctrl-C, but not for a hanging storage."""
    ended = run_program("-c", _INTERRUPTED, tmp_path, kind, finalizes=True)
    assert ended.returncode == 3, ended.stderr
    assert sorted(path.parent.name for path in tmp_path.glob("*/manifest.msgpack")) == ["0", "1"]
    assert dcp.read(tmp_path / "1")["w"].equal(torch.arange(1 << 24, dtype=torch.int32))
    (last,) = (tmp_path / "run").iterdir()
    assert last.name == "step-00000003" and dcp.read(last)["w"].eq(3).all()


def save_in_fork(root: Path, kind: dcp.AsyncCheckpointerType) -> None:
    """Save in a fork."""
    save = partial(dcp.async_save, no_dist=True, async_checkpointer_type=kind)
    save(state_of(3), checkpoint_id=root / "fork").result(240)


def fork_while_saving(root: Path, kind: dcp.AsyncCheckpointerType) -> list[Any]:
    """Fork twice during a save; the second fork saves. Return each fork's exit code, and whether the parent's
    save had ended by then."""
    save = partial(dcp.async_save, no_dist=True, async_checkpointer_type=kind)
    save(state_of(1), checkpoint_id=root / "first").result(240)
    gate = FileGate(root / "gate")
    future = save(state_of(2), storage_writer=gated_writer(root / "second", gate))
    context = multiprocessing.get_context("fork")
    results: list[Any] = []
    for target, arguments in ((int, ()), (save_in_fork, (root, kind))):
        child = context.Process(target=target, args=arguments)
        child.start()
        child.join(60)
        results += [child.exitcode, future.done()]
        child.kill()
    gate.open()
    future.result(240)
    save(state_of(4), checkpoint_id=root / "last").result(240)
    return results


@pytest.mark.parametrize("kind", [THREAD, pytest.param(PROCESS, marks=pytest.mark.exhaustive)])
def test_a_fork_does_not_disturb_a_save(tmp_path: Path, kind: dcp.AsyncCheckpointerType) -> None:
    """A fork, such as a data loader's worker, exits at once, does no harm to the save, and may save."""
    assert in_lab(fork_while_saving, tmp_path, kind) == [0, False, 0, False]
    found = [version_of(tmp_path / name) for name in ("first", "second", "fork", "last")]
    assert found == [1, 2, 3, 4]
