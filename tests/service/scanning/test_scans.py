"""Scans: the catalog has the checkpoints below a root, with their current state."""

from __future__ import annotations

import shutil
import time

import pytest

from tests.support.catalog import Catalog, pages
from tests.support.catalog_roots import OLD_SECONDS, age


def test_a_scan_reads_all_facts_of_manifests(catalog: Catalog) -> None:
    """Steps, metrics, sizes and provenance come from the manifest; runs have counts."""
    for step in (10, 20):
        user = {"step": step, "run": "a", "metrics": {"loss": 1 / step, "odd name": 1.0}}
        catalog.save(f"llama/step-{step:08d}", save_id=f"s{step}", user=user)
    catalog.save("deep/er/last", tensors=5)
    report = catalog.scan()
    assert {name: report[name] for name in ("found", "opened", "new", "committed")} == dict.fromkeys(
        ("found", "opened", "new", "committed"), 3
    )
    found = catalog.rows()
    assert list(found) == ["deep/er/last", "llama/step-00000010", "llama/step-00000020"]
    row = found["llama/step-00000020"]
    assert (row["state"], row["format"], row["step"], row["save_id"]) == ("committed", "dcp", 20, "s20")
    assert (row["bytes"], row["file_count"], row["world_size"]) == (192, 1, 2)
    assert row["committed_at"] == "2023-11-14T22:13:20.000Z"
    assert row["metrics"] == {"loss": 0.05}
    assert row["user_metadata"]["metrics"] == {"loss": 0.05, "odd name": 1.0}
    assert (row["dtypes"], row["tensor_count"]) == ({"bfloat16": 192}, 3)
    assert row["structure_id"] == found["llama/step-00000010"]["structure_id"]
    assert (found["deep/er/last"]["step"], found["deep/er/last"]["dtypes"]) == (None, {"bfloat16": 320})
    runs = {
        run["key"]: (run["checkpoint_count"], run["latest_step"]) for run in catalog.get("/runs")["items"]
    }
    assert runs == {"llama": (2, 20), "deep/er": (1, None)}


def test_unchanged_checkpoints_are_not_opened(catalog: Catalog) -> None:
    """A second scan finds all checkpoints of any state, opens none and changes no row."""
    for step in range(5):
        catalog.save(f"run/step-{step}")
    for step, name in ((5, "manifest.msgpack"), (6, "__0_0.0000abcd.distcp")):
        catalog.place(f"run/step-{step}").mkdir()
        (catalog.place(f"run/step-{step}") / name).write_bytes(b"damaged")
    age(catalog.place(""))
    first = catalog.scan()
    assert (first["found"], first["opened"], first["unreadable"], first["incomplete"]) == (7, 7, 1, 1)
    before = catalog.rows()
    second = catalog.scan()
    assert (second["found"], second["opened"], second["vanished"]) == (7, 0, 0)
    assert catalog.rows() == before


def test_recently_written_files_are_read_again(catalog: Catalog) -> None:
    """A recently written file is read again: two writes within one tick of the clock look alike."""
    catalog.save("run/step-1", save_id="first", seconds=None)
    age(catalog.place("run"), time.time() + 30)
    catalog.scan()
    version = catalog.rows()["run/step-1"]["version"]
    assert catalog.scan()["opened"] == 1
    assert catalog.rows()["run/step-1"]["version"] == version
    age(catalog.place("run"))
    assert [catalog.scan()["opened"] for _ in range(2)] == [1, 0]


def test_a_new_save_replaces_facts_and_metrics(catalog: Catalog) -> None:
    """A new save under a key replaces facts and metrics, keeps tags and pins, and counts as a commit."""
    catalog.save("run/step-1", save_id="first", user={"metrics": {"loss": 2.0}})
    catalog.scan()
    number = catalog.rows()["run/step-1"]["id"]
    for label in ("tags/mine", "pin"):
        assert catalog.status("PUT", f"/checkpoints/{number}/{label}") == 200
    catalog.save("run/step-1", save_id="second", tensors=4, seconds=OLD_SECONDS + 100)
    report = catalog.scan()
    assert (report["new"], report["changed"], report["committed"]) == (0, 1, 1)
    row = catalog.rows()["run/step-1"]
    assert (row["id"], row["save_id"], row["bytes"], row["metrics"]) == (number, "second", 256, {})
    assert (row["tags"], row["is_pinned"]) == (["mine"], True)


def test_unreadable_files_have_a_reason(catalog: Catalog) -> None:
    """Unreadable files have a reason without server paths, hide no others, and are repaired by a new save."""
    path = catalog.save("run/step-1")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    catalog.place("run/model.pt").write_bytes(b"not a checkpoint")
    catalog.place("run/w.safetensors").write_bytes(b"\xff" * 100)
    catalog.save("run/step-2")
    age(catalog.place(""))
    report = catalog.scan()
    assert (report["unreadable"], report["committed"]) == (3, 1)
    found = catalog.rows()
    assert "CRC-32" in found["run/step-1"]["problem"]
    assert found["run/model.pt"]["state"] == found["run/w.safetensors"]["state"] == "unreadable"
    assert not any(str(catalog.folder) in (row["problem"] or "") for row in found.values())
    catalog.save("run/step-1", seconds=OLD_SECONDS + 100)
    catalog.scan()
    row = catalog.rows()["run/step-1"]
    assert (row["state"], row["problem"]) == ("committed", None)


def test_vanished_checkpoints_may_return(catalog: Catalog) -> None:
    """Deleted and moved checkpoints vanish, and are committed again when they return."""
    for key in ("a/step-1", "a/step-2", "b/step-1", "b/inner/step-1", "alone-7", "d/step-1"):
        catalog.save(key)
    catalog.scan()
    for key in ("a/step-1", "alone-7", "d/step-1"):
        shutil.rmtree(catalog.place(key))
    shutil.move(catalog.place("b"), catalog.place("c"))
    assert catalog.scan()["vanished"] == 5
    gone = {key for key, state in catalog.states().items() if state == "vanished"}
    assert gone == {"a/step-1", "alone-7", "d/step-1", "b/step-1", "b/inner/step-1"}
    shutil.move(catalog.place("c"), catalog.place("b"))
    assert catalog.scan()["committed"] == 0
    assert catalog.states()["b/inner/step-1"] == "committed"
    assert catalog.states()["c/step-1"] == "vanished"


def test_a_scan_below_a_folder_leaves_the_rest_alone(catalog: Catalog) -> None:
    """A scan of a folder finds new and vanished checkpoints in this folder only."""
    for key in ("a/step-1", "a/step-2", "ab/step-1"):
        catalog.save(key)
    catalog.scan()
    for key in ("a/step-1", "ab/step-1"):
        shutil.rmtree(catalog.place(key))
    catalog.save("a/step-3")
    report = catalog.scan(below="a")
    assert (report["found"], report["new"], report["vanished"]) == (2, 1, 1)
    assert catalog.states()["ab/step-1"] == "committed"


@pytest.mark.each_database
def test_hostile_names_and_values_fail_no_scan(catalog: Catalog) -> None:
    """Hostile manifests and folder names do not hide other checkpoints."""
    hostile = {
        "step": 10**30,
        "metrics": {"nan": float("nan"), "inf": float("inf"), "big": 10**400, "": 1.0, "ok": 1.0, 7: 2.0},
        "note\0": "a\0b\ud800",
        "deep": [[[[[[[[[[(1, 2)]]]]]]]]]],
        "bytes": b"\xff\0",
    }
    names = ["a\0", "\ud800", "x" * 5000]
    catalog.save("run/step-1", user=hostile, fqns=names, planner_data=None)
    catalog.save("run/step-2", user={"step": -1, "metrics": "none"})
    for name in ("na\nme", "%2e%2e", "~x", "a::b", "back\\slash", ".hidden", "x" * 255):
        catalog.save(f"{name}/step-3")
    (catalog.place("linked")).symlink_to(catalog.place("run"))
    report = catalog.scan()
    assert [line for line in report["trouble"] if not line.startswith("skipped: ")] == []
    found = catalog.rows()
    assert sorted(found) == ["run/step-1", "run/step-2", f"{'x' * 255}/step-3"]
    assert (found["run/step-1"]["step"], found["run/step-2"]["step"]) == (1, 2)
    assert found["run/step-1"]["metrics"] == {"ok": 1.0}
    tensors = pages(catalog.http, f"/checkpoints/{found['run/step-1']['id']}/tensors")
    assert len(tensors) == 3 and all("\0" not in one["fqn"] for one in tensors)


@pytest.mark.each_database
def test_deleted_checkpoints_stay_so_until_saved_again(catalog: Catalog) -> None:
    """A deleted checkpoint stays deleted while a scan finds its files, until a later save under the key."""
    number = catalog.add("run/step-1")
    assert catalog.status("DELETE", f"/checkpoints/{number}") == 200
    assert catalog.scan()["changed"] == 0
    assert catalog.states() == {"run/step-1": "deleted"}
    assert catalog.get("/runs/1")["checkpoint_count"] == 0
    catalog.save("run/step-1", save_id="00000002", seconds=time.time())
    assert catalog.scan()["committed"] == 1
    found = catalog.rows()["run/step-1"]
    assert (found["id"], found["state"], found["deleted_at"]) == (number, "committed", None)
    assert catalog.get("/runs/1")["checkpoint_count"] == 1
