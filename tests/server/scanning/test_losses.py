"""A root that has lost much at once is believed only when a person says so; on both databases."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp.server.catalog.roots import RootRow, root_row
from dcp.server.database.engine import Database
from dcp.server.problems import UnavailableError
from dcp.server.scanning.losses import Doubt, Missing, judge
from dcp.server.scanning.scanner import Scanner, ScanReport
from tests.support.catalog_roots import roots_of, rows, scan, write_manifest


def states(database: Database) -> dict[str, str]:
    """The state of each checkpoint, by key."""
    return {key: row["state"] for key, row in rows(database).items()}


def noted(database: Database) -> RootRow:
    """What is kept of the root."""
    with database.read() as connection:
        return root_row(connection, "main")


def _emptied(root: Path, elsewhere: Path) -> None:
    root.rename(elsewhere)
    root.mkdir()


def _with_other_things(root: Path, elsewhere: Path) -> None:
    _emptied(root, elsewhere)
    write_manifest(root / "others" / "step-1")


def _a_link_to_another_folder(root: Path, elsewhere: Path) -> None:
    root.rename(elsewhere)
    write_manifest(root.parent / "another" / "theirs" / "step-9")
    root.symlink_to(root.parent / "another")


def _removed(root: Path, elsewhere: Path) -> None:
    root.rename(elsewhere)


@pytest.mark.parametrize(
    ("replace", "batches"),
    [
        *((_removed, 1), (_emptied, 4), (_with_other_things, 1), (_a_link_to_another_folder, 4)),
        pytest.param(_removed, 4, marks=pytest.mark.exhaustive),
        pytest.param(_emptied, 1, marks=pytest.mark.exhaustive),
        pytest.param(_with_other_things, 4, marks=pytest.mark.exhaustive),
        pytest.param(_a_link_to_another_folder, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_root_that_is_replaced_during_a_scan(
    database: Database, tmp_path: Path, replace: Callable[[Path, Path], None], batches: int
) -> None:
    """What is not found after a good beginning may be a share that is small enough to be believed, and what
    is found is somebody else's: the scan fails, nothing vanishes, and nothing of the other place is taken in.
    Once the root is back all is as before, with what is new."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    keys = {f"run-{number:03}/step-{number}" for number in range(200)}
    for key in keys:
        write_manifest(root / key)
    roots = roots_of(root)
    assert scan(database, roots).new == 200
    new = {f"run-19{number}/new-{number}" for number in range(10)}
    for key in new:
        write_manifest(root / key)
    seen: list[ScanReport] = []

    def on_progress(report: ScanReport) -> None:
        seen.append(report)
        if len(seen) == batches:
            replace(root, elsewhere)

    with pytest.raises(UnavailableError, match=r"root main (was replaced|is not there)"):
        Scanner(database, roots, batch=2).scan("main", on_progress=on_progress)
    found = states(database)
    assert keys <= found.keys() <= keys | new and set(found.values()) == {"committed"}
    if root.is_symlink():
        root.unlink()
    elif root.exists():
        shutil.rmtree(root)
    elsewhere.rename(root)
    report = scan(database, roots)
    assert (report.vanished, report.lost) == (0, 0)
    assert states(database) == dict.fromkeys(keys | new, "committed")


@pytest.mark.parametrize("replace", [_emptied, _with_other_things, _a_link_to_another_folder])
def test_another_place_under_the_name_of_the_root(
    database: Database, tmp_path: Path, replace: Callable[[Path, Path], None]
) -> None:
    """A mount point without its disk, or another folder in its place: nothing vanishes, however few there
    were and however often it is looked at, and it is said; once the disk is back all is as before."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for key in ("run/step-1", "run/step-2", "alone-7"):
        write_manifest(root / key)
    roots = roots_of(root)
    scan(database, roots)
    replace(root, elsewhere)
    for _ in range(2):
        report = scan(database, roots)
        assert (report.vanished, report.lost) == (0, 3)
        assert {states(database)[key] for key in ("run/step-1", "run/step-2", "alone-7")} == {"committed"}
        row = noted(database)
        assert (row.lost, row.is_other_place) == (3, True)
        assert "3 of" in str(row.scan_error) and "dcp roots accept main" in str(row.scan_error)
    root.unlink() if root.is_symlink() else shutil.rmtree(root)
    elsewhere.rename(root)
    assert scan(database, roots).lost == 0
    row = noted(database)
    assert (row.scan_error, row.is_other_place) == (None, False)


def test_a_large_part_needs_a_word(database: Database, tmp_path: Path) -> None:
    """Twelve of forty are kept until a person has said that they are gone; not more are gone by that word,
    and a root that grows meanwhile does not make them few."""
    for run in range(4):
        for step in range(10):
            write_manifest(tmp_path / f"run-{run}" / f"step-{step}")
    roots = roots_of(tmp_path)
    scan(database, roots)
    shutil.rmtree(tmp_path / "run-0")
    for step in range(2):
        shutil.rmtree(tmp_path / "run-1" / f"step-{step}")
    report = scan(database, roots)
    assert (report.vanished, report.known, report.lost) == (0, 40, 12)
    assert not noted(database).is_other_place
    for step in range(40):
        write_manifest(tmp_path / "run-new" / f"step-{step}")
    for _ in range(2):  # the second one knows the new ones, of which twelve are a small part
        assert (scan(database, roots).vanished, noted(database).lost) == (0, 12)
    assert scan(database, roots, accepted=11).lost == 12
    report = scan(database, roots, accepted=12)
    assert (report.vanished, report.lost) == (12, 0)
    assert states(database)["run-0/step-3"] == "vanished"
    assert noted(database).scan_error is None


def test_what_trainers_take_away_needs_no_word(database: Database, tmp_path: Path) -> None:
    """Runs that keep their last steps have others at each scan, be they the only ones of the root."""
    for step in range(20):
        write_manifest(tmp_path / "run" / f"step-{step}")
    roots = roots_of(tmp_path)
    scan(database, roots)
    for step in range(20):
        shutil.rmtree(tmp_path / "run" / f"step-{step}")
        write_manifest(tmp_path / "run" / f"step-{step + 20}")
    report = scan(database, roots)
    assert (report.new, report.vanished, report.lost) == (20, 20, 0)


def test_a_part_that_is_scanned_says_nothing_of_the_root(database: Database, tmp_path: Path) -> None:
    """A scan of a folder leaves what the scan of all has noted, and holds back as that does."""
    for run in ("a", "b"):
        for step in range(10):
            write_manifest(tmp_path / run / f"step-{step}")
    roots = roots_of(tmp_path)
    scan(database, roots)
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").mkdir()
    scan(database, roots)
    before = noted(database)
    assert before.lost == 10
    assert scan(database, roots, below="b").lost == 0
    assert scan(database, roots, below="a").lost == 10
    assert noted(database) == before
    assert set(states(database).values()) == {"committed"}


@pytest.mark.parametrize(
    ("gone", "known", "accepted", "before", "kept"),
    [
        (0, 0, 0, Doubt(), 0),
        (1, 1, 0, Doubt(), 1),  # all of it
        (9, 10, 0, Doubt(), 0),  # few
        (10, 50, 0, Doubt(), 0),  # a fifth
        (11, 50, 0, Doubt(), 11),
        (1, 50, 0, Doubt(frozenset({"run"})), 1),
        (1, 50, 0, Doubt(frozenset({"other"})), 0),  # what was doubted has been found again
        (11, 50, 11, Doubt(), 0),
        (12, 50, 11, Doubt(frozenset({"run"})), 12),
        (1000, 1000, 1000, Doubt(frozenset({"run"})), 0),
    ],
)
def test_how_much_is_too_much(gone: int, known: int, accepted: int, before: Doubt, kept: int) -> None:
    """All of it, or ten and more than a fifth; and what has been doubted before."""
    missing = [Missing("run", tuple(map(str, range(gone))), known, known - gone)] if gone else []
    found = judge(missing, known, accepted=accepted, before=before)
    assert found.count == kept
    assert sum(len(each.names) for each in found.gone) == gone - kept
