"""What lies below a root is in the catalog, as it is, after a scan; on both databases."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from sqlalchemy import select

import dcp
from dcp.inspection.values.digests import digests as digest_of
from dcp.server.catalog.events import events_after
from dcp.server.catalog.roots import root_row
from dcp.server.database.engine import Database
from dcp.server.database.tables import metrics, runs, structures
from dcp.server.problems import UnavailableError
from dcp.server.scanning.scanner import Scanner, ScanReport, ScanStoppedError
from tests.support.catalog_roots import age, roots_of, rows, scan, write_manifest

pytestmark = pytest.mark.each_database  # their SQL differs


def states(database: Database) -> dict[str, str]:
    """The state of each checkpoint, by key."""
    return {key: row["state"] for key, row in rows(database).items()}


def committed_events(database: Database) -> list[str]:
    """Keys of the events that tell of new content."""
    with database.read() as connection:
        events = events_after(connection, 0, 1000)
    return [event.data["key"] for event in events if event.kind == "checkpoint.committed"]


def test_facts_of_manifests(database: Database, tmp_path: Path) -> None:
    """Steps of runs are found with everything that their manifests say; a structure is stored once."""
    for step in (10, 20):
        user = {"step": step, "run": "a", "metrics": {"loss": 1 / step, "odd name": 1.0}}
        write_manifest(tmp_path / "llama" / f"step-{step:08d}", save_id=f"s{step}", user=user)
    write_manifest(tmp_path / "deep" / "er" / "last", tensors=5)
    report = scan(database, roots_of(tmp_path))
    assert (report.found, report.opened, report.new, report.committed) == (3, 3, 3, 3)
    found = rows(database)
    assert list(found) == ["deep/er/last", "llama/step-00000010", "llama/step-00000020"]
    row = found["llama/step-00000020"]
    assert (row["state"], row["format"], row["step"], row["save_id"]) == ("committed", "dcp", 20, "s20")
    assert (row["bytes"], row["file_count"], row["world_size"]) == (192, 1, 2)
    assert row["committed_seconds"] == 1_700_000_000.0
    assert row["user_metadata"] == {"step": 20, "run": "a", "metrics": {"loss": 0.05, "odd name": 1.0}}
    assert found["deep/er/last"]["step"] is None
    assert row["structure_id"] == found["llama/step-00000010"]["structure_id"]
    with database.read() as connection:
        sizes = {s.tensor_count: (s.bytes, s.dtypes) for s in connection.execute(select(structures))}
        assert sizes == {3: (192, {"bfloat16": 192}), 5: (320, {"bfloat16": 320})}
        assert sorted((m.name, m.value) for m in connection.execute(select(metrics))) == [
            ("loss", 0.05),
            ("loss", 0.1),
        ]
        counts = {r.key: (r.checkpoint_count, r.latest_step) for r in connection.execute(select(runs))}
    assert counts == {"llama": (2, 20), "deep/er": (1, None)}
    assert sorted(committed_events(database)) == list(found)


def test_the_same_tensors_are_known_by_their_digests(database: Database, tmp_path: Path) -> None:
    """Two saves and a conversion of one; not a save without digests, nor what differs in one bit."""
    state = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2)}
    for name, digests in (("one", True), ("two", True), ("none", False)):
        writer = dcp.FileSystemWriter(tmp_path / "run" / name, digests=digests)
        dcp.save(state, storage_writer=writer, user_metadata={"name": name})
    dcp.convert(tmp_path / "run" / "one", tmp_path / "run" / "converted", to="dcp")
    state["b"][1] = 1.0000001
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "run" / "other", digests=True))
    age(tmp_path / "run")
    scan(database, roots_of(tmp_path))
    found = {key.removeprefix("run/"): row["content_digest"] for key, row in rows(database).items()}
    assert (
        found["one"] == found["two"] == found["converted"] == digest_of(str(tmp_path / "run" / "one")).digest
    )
    assert found["none"] is None and len({*found.values()}) == 3


def test_what_has_not_changed_is_not_opened(database: Database, tmp_path: Path) -> None:
    """A second scan finds all and opens nothing, whatever their state; versions stay."""
    for step in range(5):
        write_manifest(tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-5").mkdir()
    (tmp_path / "run" / "step-5" / "manifest.msgpack").write_bytes(b"damaged")
    (tmp_path / "run" / "step-6").mkdir()
    (tmp_path / "run" / "step-6" / "__0_0.0000abcd.distcp").write_bytes(b"data")
    age(tmp_path)
    roots = roots_of(tmp_path)
    first = scan(database, roots)
    assert (first.found, first.opened, first.unreadable, first.incomplete) == (7, 7, 1, 1)
    before = rows(database)
    second = scan(database, roots)
    assert (second.found, second.opened, second.vanished) == (7, 0, 0)
    assert rows(database) == before


def test_a_young_one_is_read_again(database: Database, tmp_path: Path) -> None:
    """Two writes within one tick of the clock cannot be told apart, so a young file is not trusted yet."""
    write_manifest(tmp_path / "run" / "step-1", save_id="first", seconds=None)
    age(tmp_path, time.time() + 30)  # by another clock, and however long this takes
    roots = roots_of(tmp_path)
    scan(database, roots)
    assert rows(database)["run/step-1"]["fingerprint"] is None
    version = rows(database)["run/step-1"]["version"]
    assert scan(database, roots).opened == 1
    assert rows(database)["run/step-1"]["version"] == version
    age(tmp_path)
    assert scan(database, roots).opened == 1
    assert scan(database, roots).opened == 0


def test_saved_again(database: Database, tmp_path: Path) -> None:
    """Another save to the same key is new content: facts are replaced, and it is told once more."""
    write_manifest(tmp_path / "run" / "step-1", save_id="first", user={"metrics": {"loss": 2.0}})
    roots = roots_of(tmp_path)
    scan(database, roots)
    write_manifest(tmp_path / "run" / "step-1", save_id="second", tensors=4, seconds=1_700_000_100.0)
    report = scan(database, roots)
    assert (report.new, report.changed, report.committed) == (0, 1, 1)
    row = rows(database)["run/step-1"]
    assert (row["save_id"], row["bytes"]) == ("second", 256)
    assert committed_events(database) == ["run/step-1", "run/step-1"]
    with database.read() as connection:
        assert connection.execute(select(metrics)).all() == []


def test_an_incomplete_one_that_commits(database: Database, tmp_path: Path) -> None:
    """Data without a commit is incomplete, and committed after the commit."""
    folder = tmp_path / "run" / "step-1"
    folder.mkdir(parents=True)
    (folder / "__0_0.0000abcd.distcp").write_bytes(b"x" * 192)
    roots = roots_of(tmp_path)
    scan(database, roots)
    row = rows(database)["run/step-1"]
    assert (row["state"], row["bytes"], row["step"]) == ("incomplete", 192, 1)
    write_manifest(folder)
    scan(database, roots)
    assert states(database) == {"run/step-1": "committed"}
    assert committed_events(database) == ["run/step-1"]


def test_unreadable_ones_have_the_reason(database: Database, tmp_path: Path) -> None:
    """A damaged manifest, one of a later version and a file that is no checkpoint: each says why, and none
    keeps the others from being found; paths of the server are not told."""
    path = write_manifest(tmp_path / "run" / "step-1")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    (tmp_path / "run" / "model.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "run" / "w.safetensors").write_bytes(b"\xff" * 100)
    write_manifest(tmp_path / "run" / "step-2")
    age(tmp_path)
    report = scan(database, roots_of(tmp_path))
    assert (report.unreadable, report.committed) == (3, 1)
    found = rows(database)
    assert "CRC-32" in found["run/step-1"]["problem"]
    assert found["run/model.pt"]["state"] == found["run/w.safetensors"]["state"] == "unreadable"
    for row in found.values():
        assert str(tmp_path) not in (row["problem"] or "")
    write_manifest(tmp_path / "run" / "step-1", seconds=1_700_000_100.0)
    scan(database, roots_of(tmp_path))
    assert states(database)["run/step-1"] == "committed"
    assert rows(database)["run/step-1"]["problem"] is None


def test_vanished(database: Database, tmp_path: Path) -> None:
    """A checkpoint, and a run, that are not there any more are vanished; back again, they are committed."""
    for key in ("a/step-1", "a/step-2", "b/step-1", "b/inner/step-1"):
        write_manifest(tmp_path / key)
    roots = roots_of(tmp_path)
    scan(database, roots)
    shutil.rmtree(tmp_path / "a" / "step-1")
    shutil.move(tmp_path / "b", tmp_path / "c")
    report = scan(database, roots)
    assert report.vanished == 3
    assert states(database) == {
        "a/step-1": "vanished",
        "a/step-2": "committed",
        "b/step-1": "vanished",
        "b/inner/step-1": "vanished",
        "c/step-1": "committed",
        "c/inner/step-1": "committed",
    }
    shutil.move(tmp_path / "c", tmp_path / "b")
    scan(database, roots)
    assert states(database)["b/inner/step-1"] == "committed"
    assert states(database)["c/step-1"] == "vanished"


def test_the_last_of_a_run_vanishes(database: Database, tmp_path: Path) -> None:
    """Also from a folder that is still there, and from the root itself."""
    write_manifest(tmp_path / "run" / "step-1")
    write_manifest(tmp_path / "alone-7")
    write_manifest(tmp_path / "other" / "step-1")
    roots = roots_of(tmp_path)
    scan(database, roots)
    shutil.rmtree(tmp_path / "run" / "step-1")
    shutil.rmtree(tmp_path / "alone-7")
    assert scan(database, roots).vanished == 2
    assert states(database) == {
        "alone-7": "vanished",
        "other/step-1": "committed",
        "run/step-1": "vanished",
    }


def test_a_root_that_is_away(database: Database, tmp_path: Path) -> None:
    """When a disk is not mounted nothing has vanished: the scan fails, says so, and works again by itself."""
    root = tmp_path / "root"
    write_manifest(root / "run" / "step-1")
    roots = roots_of(root)
    scan(database, roots)
    root.rename(tmp_path / "away")
    with pytest.raises(UnavailableError):
        scan(database, roots)
    assert states(database) == {"run/step-1": "committed"}
    with database.read() as connection:
        assert root_row(connection, "main").scan_error == "the folder of root main is not there"
    (tmp_path / "away").rename(root)
    scan(database, roots)
    with database.read() as connection:
        row = root_row(connection, "main")
    assert row.scan_error is None
    assert row.scan_state["found"] == 1


def test_only_a_part(database: Database, tmp_path: Path) -> None:
    """A scan below a folder finds what is in it, and what has gone from it; the rest is left alone."""
    for key in ("a/step-1", "a/step-2", "ab/step-1"):
        write_manifest(tmp_path / key)
    roots = roots_of(tmp_path)
    scan(database, roots)
    for key in ("a/step-1", "ab/step-1"):
        shutil.rmtree(tmp_path / key)
    write_manifest(tmp_path / "a" / "step-3")
    report = scan(database, roots, below="a")
    assert (report.found, report.new, report.vanished) == (2, 1, 1)
    assert states(database)["ab/step-1"] == "committed"


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
    """Scanners that work on one root at the same time write each checkpoint once, and tell of it once."""
    for step in range(60):
        write_manifest(tmp_path / "run" / f"step-{step}", save_id=f"{step}")
    roots = roots_of(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        scanners = [Scanner(database, roots, batch=7) for _ in range(4)]
        reports = [pool.submit(scanner.scan, "main") for scanner in scanners]
    assert [report.result().found for report in reports] == [60] * 4
    assert len(rows(database)) == 60
    assert sorted(committed_events(database)) == sorted(rows(database))


def test_hostile_names_and_values(database: Database, tmp_path: Path) -> None:
    """What anybody may write into a manifest, and any name of a folder, fails no scan."""
    hostile = {
        "step": 10**30,
        "metrics": {"nan": float("nan"), "inf": float("inf"), "big": 10**400, "": 1.0, "ok": 1.0, 7: 2.0},
        "note\0": "a\0b\ud800",
        "deep": [[[[[[[[[[(1, 2)]]]]]]]]]],
        "bytes": b"\xff\0",
    }
    write_manifest(
        tmp_path / "run" / "step-1", user=hostile, fqns=["a\0", "\ud800", "x" * 5000], planner_data=None
    )
    write_manifest(tmp_path / "run" / "step-2", user={"step": -1, "metrics": "none"})
    for name in ("na\nme", "%2e%2e", "~x", "a::b", "back\\slash", ".hidden", "x" * 255):
        write_manifest(tmp_path / name / "step-3")
    (tmp_path / "linked").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "latest").symlink_to(tmp_path / "run" / "step-1")
    report = scan(database, roots_of(tmp_path))
    assert [line for line in report.trouble if not line.startswith("passed over: ")] == []
    found = rows(database)
    assert sorted(found) == ["run/step-1", "run/step-2", f"{'x' * 255}/step-3"]
    assert (found["run/step-1"]["step"], found["run/step-2"]["step"]) == (1, 2)
    with database.read() as connection:
        assert [(m.name, m.value) for m in connection.execute(select(metrics))] == [("ok", 1.0)]
