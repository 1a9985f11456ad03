"""Two jobs that save to one id by mistake, and somebody who loads it meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import CheckpointConflictError
from tests.support.crashes import Child, in_lab
from tests.support.fault_doors import findings
from tests.support.versions import (
    ABSENT,
    MIXED,
    listing,
    save_version,
    seen_by_dcp,
    seen_by_stock,
)

CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
ROUNDS = 14
MOST_ROUNDS = 440  # versions have three digits
PATIENCE_SECONDS = 120.0
"""How long two writers may need to meet, on a machine that has little time for either of them."""


def write_often(folder: Path, first: int, start: float, bare: bool) -> list[tuple[int, bool]]:
    """(version, committed) of some saves in a row, and more until the writers have met; any error but a
    conflict ends the test."""
    outcomes: list[tuple[int, bool]] = []
    met = folder.with_name("met")
    time.sleep(max(0.0, start - time.monotonic()))
    for version in range(first, first + MOST_ROUNDS):
        if len(outcomes) >= ROUNDS and (met.exists() or time.monotonic() > start + PATIENCE_SECONDS):
            break
        try:
            save_version(folder, version, torch_compatible=not (bare and version % 2))
        except CheckpointConflictError:
            outcomes.append((version, False))
            met.touch()
        else:
            outcomes.append((version, True))
    return outcomes


def read_often(folder: Path, end: Path) -> list[int | str]:
    """What loads see until the file ``end`` is there, and once more."""
    seen = []
    while not end.exists():
        seen.append(seen_by_dcp(folder))
    return [*seen, seen_by_dcp(folder)]


def overwriting_race(root: Path, bare: bool) -> Any:
    """Two writers and a reader on one id."""
    folder = root / "x"
    start = time.monotonic() + 0.3
    writers = [Child(write_often, folder, first, start, bare) for first in (100, 550)]
    reader = Child(read_often, folder, root / "end")
    endings = [writer.wait() for writer in writers]
    (root / "end").touch()
    endings.append(reader.wait())
    for ending in endings:
        if ending.raised is not None:
            raise AssertionError(ending.raised.traceback_text)
    at_end = seen_by_dcp(folder), seen_by_stock(folder), listing(folder), findings(folder)
    return [ending.value for ending in endings], at_end


def test_two_writers_overwrite_one_id(tmp_path: Path) -> None:
    """Each save commits whole or raises CheckpointConflictError; a reader sees committed states only."""
    (first, second, seen), (last, stock, files, found) = in_lab(overwriting_race, tmp_path, False)
    committed = {version for version, done in first + second if done}
    lost = [version for version, done in first + second if not done]
    assert len(committed) >= ROUNDS / 2
    assert lost, "the writers never met"
    # on a busy machine one of them may win every time
    won = [[version for version, done in outcomes if done] for outcomes in (first, second)]
    finals = [versions[-1] for versions in won if versions]
    assert last in finals
    assert (stock, files, found) == (last, CLEAN, set())
    counts = Counter(seen)
    versions = {version for version in counts if isinstance(version, int)}
    assert versions
    assert versions <= committed
    assert counts[MIXED] == 0
    # A file that was replaced between opening the manifest and reading is gone, and named as missing.
    assert set(counts) - versions <= {ABSENT, "CorruptCheckpointError", "CheckpointConflictError"}


def test_two_writers_with_and_without_torchs_metadata(tmp_path: Path) -> None:
    """Also when they leave `.metadata` out now and then, it is never that of another save in the end."""
    (first, second, seen), (last, stock, files, found) = in_lab(overwriting_race, tmp_path, True)
    committed = {version for version, done in first + second if done}
    assert last in committed
    assert stock in (last, ABSENT)
    assert found == set()
    assert files["data"] == files["manifest"] == 1
    assert {version for version in seen if isinstance(version, int)} <= committed
    assert MIXED not in seen


def creating_race(root: Path) -> list[Any]:
    """Both writers make the first save, many times over, until they have met."""
    rounds: list[Any] = []
    give_up = time.monotonic() + PATIENCE_SECONDS
    while len(rounds) < 8 or (all(all(outcomes) for outcomes, *_ in rounds) and time.monotonic() < give_up):
        folder = root / str(len(rounds))
        start = time.monotonic() + 0.05
        writers = [Child(write_once, folder, version, start) for version in (1, 2)]
        endings = [writer.wait() for writer in writers]
        for ending in endings:
            if ending.raised is not None:
                raise AssertionError(ending.raised.traceback_text)
        rounds.append(
            (
                [ending.value for ending in endings],
                seen_by_dcp(folder),
                seen_by_stock(folder),
                listing(folder),
            )
        )
    return rounds


def write_once(folder: Path, version: int, start: float) -> bool:
    """Whether the save committed."""
    time.sleep(max(0.0, start - time.monotonic()))
    try:
        save_version(folder, version)
    except CheckpointConflictError:
        return False
    return True


def test_two_writers_create_one_id(tmp_path: Path) -> None:
    """One of them wins and the other knows that it lost, or it came so late that it overwrote."""
    rounds = in_lab(creating_race, tmp_path)
    for outcomes, seen, stock, files in rounds:
        assert any(outcomes)
        assert seen in [version for version, done in zip((1, 2), outcomes, strict=True) if done]
        assert (stock, files) == (seen, CLEAN)
    assert any(not all(outcomes) for outcomes, *_ in rounds)


def refusing_race(root: Path) -> list[Any]:
    """As `creating_race`, by writers that refuse to overwrite."""
    rounds = []
    for number in range(6):
        folder = root / str(number)
        start = time.monotonic() + 0.05
        writers = [Child(write_only_new, folder, version, start) for version in (1, 2, 3)]
        rounds.append(([writer.wait().value for writer in writers], seen_by_dcp(folder), listing(folder)))
    return rounds


def write_only_new(folder: Path, version: int, start: float) -> bool:
    """Whether the save with ``overwrite=False`` committed."""
    time.sleep(max(0.0, start - time.monotonic()))
    try:
        save_version(folder, version, overwrite=False)
    except CheckpointConflictError:
        return False
    return True


def test_writers_that_refuse_to_overwrite_have_one_winner(tmp_path: Path) -> None:
    """With ``overwrite=False`` exactly one of three commits, whoever comes when."""
    for outcomes, seen, files in in_lab(refusing_race, tmp_path):
        assert sorted(outcomes) == [False, False, True]
        assert seen == 1 + outcomes.index(True)
        assert files == CLEAN


@pytest.mark.parametrize("bare", [False, True])
def test_a_save_refuses_what_changed_since_it_began(tmp_path: Path, bare: bool) -> None:
    """Leaves the other's checkpoint alone, where it is overtaken between its start and its commit."""
    folder = tmp_path / "x"
    save_version(folder, 1, torch_compatible=not bare)
    writer = dcp.FileSystemWriter(folder, torch_compatible=not bare)
    writer.prepare()
    save_version(folder, 2, torch_compatible=not bare)
    with pytest.raises(CheckpointConflictError) as caught:
        writer.publish(dcp.open_index(folder))
    assert caught.value.path == str(folder) and str(folder) in str(caught.value)
    assert seen_by_dcp(folder) == 2 and listing(folder)["data"] == 1
