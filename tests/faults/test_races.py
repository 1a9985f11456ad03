"""Jobs that save to the same id by mistake, and a job that loads it meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import CheckpointConflictError
from tests.support.crashes import Child, in_lab
from tests.support.fault_doors import findings
from tests.support.versions import ABSENT, MIXED, listing, save_version, seen_by_dcp, seen_by_stock

CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
ROUNDS = 14
MOST_ROUNDS = 440  # versions have three digits
PATIENCE_SECONDS = 120.0
"""Seconds that two writers may need to overlap, on a busy machine."""


def _commits(folder: Path, version: int, start: float = 0.0, **options: Any) -> bool:
    time.sleep(max(0.0, start - time.monotonic()))
    try:
        save_version(folder, version, **options)
    except CheckpointConflictError:
        return False
    return True


def _values_of(children: list[Child]) -> list[Any]:
    endings = [child.wait() for child in children]
    for ending in endings:
        assert ending.raised is None, ending.raised.traceback_text
    return [ending.value for ending in endings]


def write_often(folder: Path, first: int, start: float, bare: bool) -> dict[int, bool]:
    """Save some versions, and more until the writers overlapped. Return by version whether it committed."""
    done: dict[int, bool] = {}
    met = folder.with_name("met")
    for version in range(first, first + MOST_ROUNDS):
        if len(done) >= ROUNDS and (met.exists() or time.monotonic() > start + PATIENCE_SECONDS):
            break
        done[version] = _commits(folder, version, start, torch_compatible=not (bare and version % 2))
        if not done[version]:
            met.touch()
    return done


def _read_often(folder: Path, end: Path) -> set[int | str]:
    seen = set()
    while not end.exists():
        seen.add(seen_by_dcp(folder))
    return seen | {seen_by_dcp(folder)}


def overwriting_race(root: Path, bare: bool) -> Any:
    """Run two writers and a reader on one id. Return their results and the final state."""
    folder, start = root / "x", time.monotonic() + 0.3
    writers = [Child(write_often, folder, first, start, bare) for first in (100, 550)]
    reader = Child(_read_often, folder, root / "end")
    done = _values_of(writers)
    (root / "end").touch()
    at_end = seen_by_dcp(folder), seen_by_stock(folder), listing(folder), findings(folder)
    return done, _values_of([reader])[0], at_end


@pytest.mark.parametrize("bare", [False, True])
def test_two_writers_overwrite_one_id(tmp_path: Path, bare: bool) -> None:
    """Each save commits whole or raises CheckpointConflictError, and a reader sees committed states only. The
    final `.metadata` is of the same save as the manifest, or missing."""
    done, seen, (last, stock, files, found) = in_lab(overwriting_race, tmp_path, bare)
    committed = {version for one in done for version in one if one[version]}
    assert len(committed) >= ROUNDS / 2
    assert not all(all(one.values()) for one in done), "the writers never met"
    assert last in [max(version for version in one if one[version]) for one in done if any(one.values())]
    assert stock == last or (bare and stock == ABSENT)
    assert found == set() and files["data"] == files["manifest"] == 1 and (bare or files == CLEAN)
    assert MIXED not in seen and seen & committed
    # A load may find that a data file was replaced after it read the manifest, and raise that it is missing.
    assert seen - committed <= {ABSENT, "CorruptCheckpointError", "CheckpointConflictError"}


def _creating_race(root: Path, versions: tuple[int, ...], rounds: int, options: dict[str, Any]) -> list[Any]:
    seen: list[Any] = []
    give_up = time.monotonic() + PATIENCE_SECONDS
    while len(seen) < rounds or (all(all(done) for done, *_ in seen) and time.monotonic() < give_up):
        folder, start = root / str(len(seen)), time.monotonic() + 0.05
        done = _values_of([Child(_save_at, folder, version, start, options) for version in versions])
        seen.append((done, seen_by_dcp(folder), seen_by_stock(folder), listing(folder)))
    return seen


def _save_at(folder: Path, version: int, start: float, options: dict[str, Any]) -> bool:
    return _commits(folder, version, start, **options)


@pytest.mark.parametrize("overwrite", [True, False])
def test_writers_create_one_id(tmp_path: Path, overwrite: bool) -> None:
    """One writer wins; the others raise a conflict, or began late enough to overwrite. With
    ``overwrite=False`` exactly one commits."""
    versions = (1, 2) if overwrite else (1, 2, 3)
    rounds = in_lab(_creating_race, tmp_path, versions, 5, {"overwrite": overwrite})
    for done, seen, stock, files in rounds:
        assert done[seen - 1] and (stock, files) == (seen, CLEAN)
        assert overwrite or sum(done) == 1
    assert any(not all(done) for done, *_ in rounds)


@pytest.mark.parametrize("bare", [False, True])
def test_a_save_overtaken_before_its_commit_fails(tmp_path: Path, bare: bool) -> None:
    """A save that is overtaken before its commit leaves the other job's checkpoint unchanged."""
    folder = tmp_path / "x"
    save_version(folder, 1, torch_compatible=not bare)
    writer = dcp.FileSystemWriter(folder, torch_compatible=not bare)
    writer.prepare()
    save_version(folder, 2, torch_compatible=not bare)
    with pytest.raises(CheckpointConflictError) as caught:
        writer.publish(dcp.open_index(folder), {}, {})
    assert caught.value.path == str(folder) and str(folder) in str(caught.value)
    assert seen_by_dcp(folder) == 2 and listing(folder)["data"] == 1
