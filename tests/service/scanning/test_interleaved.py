"""Scans and registrations beside others. Internal: instants between two batches are reached by no request."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
import torch

import dcp
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from dcp.server.jobs import ledger
from dcp.server.problems import UnavailableError
from dcp.server.roots import Roots
from dcp.server.scanning.registering import Registration, register
from dcp.server.scanning.scanner import Scanner, ScanReport, ScanStoppedError
from dcp.server.settings import RootSettings
from tests.support.catalog_roots import roots_of, rows, scan, write_manifest
from tests.support.written import written_by

LEASE_SECONDS = 10.0


def states(database: Database) -> dict[str, str]:
    """The state of each checkpoint, by key."""
    return {key: row["state"] for key, row in rows(database).items()}


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


def test_stopped_and_gone_on_with(database: Database, tmp_path: Path) -> None:
    """A scan that is stopped leaves whole batches, and nothing vanished; the next one finishes."""
    for step in range(10):
        write_manifest(tmp_path / "run" / f"step-{step}")
    seen: list[int] = []

    def note(report: ScanReport) -> None:
        seen.append(report.new)

    scanner = Scanner(database, roots_of(tmp_path), batch=4)
    with pytest.raises(ScanStoppedError):
        scanner.scan("main", stopped=lambda: True, on_progress=note)
    assert len(rows(database)) == 4
    assert scanner.scan("main", on_progress=note).new == 6
    assert seen[0] == 4 and seen[-1] == 6
    assert set(states(database).values()) == {"committed"}


def test_two_at_once(database: Database, tmp_path: Path) -> None:
    """Scanners that work on one root at the same time write each checkpoint once, and count it once."""
    for step in range(60):
        write_manifest(tmp_path / "run" / f"step-{step}", save_id=f"{step}")
    roots = roots_of(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        scanners = [Scanner(database, roots, batch=7) for _ in range(4)]
        reports = [pool.submit(scanner.scan, "main") for scanner in scanners]
    assert sum(report.result().committed for report in reports) == 60
    assert len(rows(database)) == 60


def test_a_deletion_beside_a_new_save(database: Database, tmp_path: Path) -> None:
    """What is saved and registered anew while somebody looks, and finds nothing, is not marked as gone."""
    roots = roots_of(tmp_path / "main")
    database.transact(lambda connection: sync_roots(connection, {"main": str(tmp_path / "main")}))
    folder = tmp_path / "main" / "run" / "step-1"
    write_manifest(folder)
    register(database, roots, Registration(root="main", key="run/step-1"), actor="t")
    shutil.rmtree(folder)
    times = count(time.time() + 10.0)

    def clock() -> float:
        """Whenever the deletion asks for the time, the new save has just been told of."""
        write_manifest(folder, save_id="0000beef")
        register(database, roots, saved, actor="key:other", clock=lambda: next(times))
        return next(times)

    saved = Registration(root="main", key="run/step-1")
    gone = Registration(root="main", key="run/step-1", deleted=True)
    assert register(database, roots, gone, actor="key:trainer", clock=clock).is_present
    row = rows(database)["run/step-1"]
    assert (row["state"], row["save_id"]) == ("committed", "0000beef")


@pytest.mark.parametrize("count", [5_000, pytest.param(300_000, marks=pytest.mark.exhaustive)])
def test_leases_are_renewed_while_it_is_written(tmp_path: Path, count: int) -> None:
    """Another process that writes to the same SQLite file gets its turn all the time, between transactions of
    some rows each, and all is done long before a request is given up."""
    folder, url = tmp_path / "main", f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    dcp.save({f"layers.{n}.weight": torch.zeros(2) for n in range(count)}, checkpoint_id=folder / "step-1")
    database, other = Database(url), Database(url)  # each with a connection of its own that writes
    upgrade(database)
    spec = ledger.JobSpec(kind="stats", params={}, created_by="test")

    def claim() -> ledger.Claim:
        other.transact(lambda connection: ledger.submit(connection, spec, time.time()))
        made = other.transact(lambda c: ledger.claim(c, "worker", time.time(), LEASE_SECONDS))
        assert made is not None
        return made

    held, ended = {claim().held: None}, threading.Event()
    turns: list[int] = []  # how many transactions of the registration were before each
    lost: list[ledger.Held] = []

    def renew() -> None:
        while not ended.is_set():
            lost.extend(other.transact(lambda c: ledger.renew(c, "worker", held, time.time(), LEASE_SECONDS)))
            turns.append(found.transactions)
            time.sleep(0.01)

    database.transact(lambda connection: sync_roots(connection, {"main": str(folder)}))
    renewing = threading.Thread(target=renew)
    begun = time.process_time()
    with written_by(database) as found:
        renewing.start()
        try:
            roots = Roots({"main": RootSettings(url=str(folder))})
            registered = register(database, roots, Registration(key="step-1", root="main"), actor="test")
        finally:
            ended.set()
            renewing.join()
            for one in (database, other):
                one.close()
    assert registered.is_new
    assert turns and not lost
    assert 1_000 < found.most_inserted <= 2_000
    if count > 100_000:
        assert len({*turns}) > 10
        assert time.process_time() - begun < 50
