"""A checkpoint that is replaced after a reader read its index and before the reader opens its files."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import CheckpointConflictError, CheckpointNotFoundError, CorruptCheckpointError, StorageError
from dcp.storage.stores import PosixStore, Store
from tests.support.crashes import in_lab
from tests.support.fault_doors import Fault, FaultInjectingStore
from tests.support.rank_acts import ObjectLoadPlanner
from tests.support.ranks import run_ranks
from tests.support.versions import save_version, version_of, version_state


def reader(path: Any, overtake: Callable[[], None], *, times: int = 1) -> dcp.FileSystemReader:
    """Return a reader that calls ``overtake``, which replaces the checkpoint, before it first opens a data
    file, ``times`` times. An error of ``overtake`` is raised as the file system's."""
    left = [times]

    def hook(_: object) -> None:
        if left[0]:
            left[0] -= 1
            overtake()

    def open_store(path: str | os.PathLike[str]) -> Store:
        return FaultInjectingStore(PosixStore(path), Fault("open_read", name="*.distcp", hook=hook))

    return dcp.FileSystemReader(path, open_store=open_store)


def _replacing(path: Any) -> Callable[[], None]:
    version = [1]

    def replace() -> None:
        version[0] += 1
        save_version(Path(path), version[0])

    return replace


@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, ObjectLoadPlanner])
def test_an_overtaken_load_reads_the_successor(tmp_path: Path, planner: type[dcp.DefaultLoadPlanner]) -> None:
    """Each value is of the new checkpoint, and the report counts two attempts."""
    save_version(tmp_path, 1)
    state = version_state(0)
    report = dcp.load(state, storage_reader=reader(tmp_path, _replacing(tmp_path)), planner=planner())
    assert version_of(state) == 2
    assert report.attempts == 2
    assert report.missing == report.unexpected == []


def _refuse(number: int, path: Path) -> None:
    if number == errno.ENOENT:
        raise CheckpointNotFoundError(f"{path} does not exist", path=str(path))
    raise StorageError(os.strerror(number), op="open", path=str(path), errno=number)


@pytest.mark.parametrize("is_replaced", [True, False])
@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_one_enoent_or_estale_is_retried(tmp_path: Path, number: int, is_replaced: bool) -> None:
    """A load retries after ENOENT or ESTALE, since network file systems cache old names."""
    save_version(tmp_path, 1)

    def overtake() -> None:
        if is_replaced:
            save_version(tmp_path, 2)
        _refuse(number, tmp_path / "data")

    state = version_state(0)
    report = dcp.load(state, storage_reader=reader(tmp_path, overtake))
    assert version_of(state) == (2 if is_replaced else 1)
    assert report.attempts == (1 if number == errno.ENOENT and not is_replaced else 2)


def test_a_load_overtaken_at_each_attempt_fails(tmp_path: Path) -> None:
    """A load that is overtaken at each attempt raises an error with the path."""
    save_version(tmp_path, 1)
    newest, calls = tmp_path, list[int]()
    replace = _replacing(newest)

    def overtake() -> None:
        calls.append(1)
        replace()

    with pytest.raises(CheckpointConflictError, match="was replaced during the load") as caught:
        dcp.load(version_state(0), storage_reader=reader(newest, overtake, times=99))
    assert isinstance(caught.value, dcp.RankFailedError) and caught.value.path == str(newest)
    assert len(calls) == 3


@pytest.mark.parametrize("removed", ["*.distcp", "*"])
def test_a_missing_file_is_still_an_error(tmp_path: Path, removed: str) -> None:
    """A missing file is an error if no save committed meanwhile, or if the checkpoint was deleted."""
    save_version(tmp_path, 1)
    calls = []

    def remove() -> None:
        calls.append(1)
        for path in tmp_path.glob(removed):
            path.unlink()

    with pytest.raises(CorruptCheckpointError, match="is missing"):
        dcp.load(version_state(0), storage_reader=reader(tmp_path, remove, times=99))
    assert len(calls) == 1


class Counted:
    """`Stateful` that counts calls of `load_state_dict`."""

    def __init__(self) -> None:
        self.state, self.given = {"w": torch.zeros(8)}, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state itself."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count the call."""
        self.given += 1


def _save_counted(path: str, value: float) -> None:
    state = {"part": {"w": torch.full((8,), value)}, "value": value}
    dcp.save(state, checkpoint_id=path, no_dist=True)


def _load_overtaken(rank: int, world_size: int, path: str, overtaken: int, how: str) -> Any:
    def overtake() -> None:
        if how == "replaced":
            _save_counted(path, 2.0)
        else:
            next(Path(path).glob("*.distcp")).unlink()

    state: dict[str, Any] = {"part": Counted(), "value": 0.0}
    source = reader(path, overtake) if rank == overtaken else dcp.FileSystemReader(path)
    report = dcp.load(state, storage_reader=source, timeout_seconds=200)
    return state["part"].state["w"].tolist(), state["value"], state["part"].given, report.attempts


@pytest.mark.parametrize("overtaken", [0, 1])
def test_all_ranks_load_the_new_checkpoint(tmp_path: Path, overtaken: int) -> None:
    """All ranks load the new checkpoint, also ranks that had read the old; stateful objects load once."""
    _save_counted(str(tmp_path), 1.0)
    for values, value, given, attempts in run_ranks(2, _load_overtaken, str(tmp_path), overtaken, "replaced"):
        assert (values, value) == ([2.0] * 8, 2.0)
        assert (given, attempts) == (1, 2)


def overtake_at_opens(folder: Path, versions: list[int]) -> None:
    """Replace the checkpoint in ``folder``, from now on, each time this process opens a data file to read,
    until all ``versions`` are saved."""
    is_saving: list[bool] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or is_saving or not versions or args[2] & os.O_WRONLY:
            return
        if str(args[0]).startswith(str(folder)) and str(args[0]).endswith(".distcp"):
            is_saving.append(True)
            save_version(folder, versions.pop(0))
            is_saving.clear()

    sys.addaudithook(hook)


def _restore_overtaken(root: Path) -> tuple[int, list[Any], int | str]:
    for step in (1, 2):
        save_version(root / f"step-{step:08d}", step)
    overtake_at_opens(root / "step-00000002", [11, 12, 13])
    state = version_state(0)
    with dcp.CheckpointManager(root, no_dist=True, retry_pause_seconds=0.01) as manager:
        restored = manager.restore(state)
    assert restored is not None
    return restored.step, list(restored.skipped), version_of(state)


def test_an_overtaken_restore_takes_no_older_step(tmp_path: Path) -> None:
    """A restore takes the newest step as last saved, and does not take replacements for damage."""
    assert in_lab(_restore_overtaken, tmp_path) == (2, [], 13)
