"""Missing roots and large losses: checkpoints vanish only after a person confirms."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.catalog import API, Catalog
from tests.support.lost_roots import PLACES, is_a_link_elsewhere, is_emptied, is_removed, put_back


def root_of(catalog: Catalog) -> Any:
    """Return the root main."""
    return catalog.get("/roots/main")


def check_of_main(catalog: Catalog) -> Any:
    """Return the check of the root main; the service is ready regardless of the check."""
    assert catalog.http.get("/readyz").json() == {"status": "ok", "checks": {"database": "ok"}}
    (found,) = (one for one in catalog.get("/root-checks")["items"] if one["root"] == "main")
    assert f'dcp_root_up{{root="main"}} {float(found["is_ok"])}' in catalog.http.get("/metrics").text
    return found


KEYS = ("run/step-1", "run/step-2", "alone-7")


@pytest.mark.parametrize("replace", PLACES)
def test_a_root_without_its_mount_loses_nothing(catalog: Catalog, replace: Callable[[Path], None]) -> None:
    """A root without its mount loses no checkpoint; its check shows the reason, and the service is ready."""
    for key in KEYS:
        catalog.save(key)
    catalog.scan()
    replace(catalog.place(""))
    for _ in range(2):
        job = catalog.do("scan", root="main")
        assert {catalog.states()[key] for key in KEYS} == {"committed"}
        root = root_of(catalog)
        if job["state"] != "succeeded":
            assert root["scan_error"] == "the folder of root main does not exist; is the disk mounted?"
            continue
        assert (job["result"]["vanished"], job["result"]["lost"], root["lost"]) == (0, 3, 3)
        assert "3 of" in root["scan_error"] and "dcp roots accept main" in root["scan_error"]
    found = check_of_main(catalog)
    assert not found["is_ok"] and str(catalog.folder) not in found["detail"]
    put_back(catalog.place(""))
    assert catalog.scan()["lost"] == 0
    assert root_of(catalog)["scan_error"] is None


def test_requests_to_a_missing_root_get_503(catalog: Catalog) -> None:
    """A missing root is not created, requests for stored bytes get 503, and a reported deletion gets 503."""
    number = catalog.add("run/step-1")
    is_removed(catalog.place(""))
    catalog.do("scan", root="main")
    note = "the last scan of root main: the folder of root main does not exist; is the disk mounted?"
    assert note in catalog.get("/runs", root="main")["notes"]
    answer = catalog.http.get(f"{API}/checkpoints/{number}/files")
    assert (answer.status_code, "does not exist" in answer.json()["detail"]) == (503, True)
    gone = {"root": "main", "key": "run/step-1", "deleted": True}
    assert catalog.status("POST", "/checkpoints", json=gone) == 503
    assert catalog.states() == {"run/step-1": "committed"}
    assert not catalog.place("").exists()


def test_a_purge_waits_for_the_disk(catalog: Catalog) -> None:
    """A purge waits for a missing root: otherwise its files would return with the disk, unknown."""
    number = catalog.add("run/step-1")
    catalog.add("run/step-2")
    assert catalog.status("DELETE", f"/checkpoints/{number}", params={"grace_seconds": 0}) == 200
    order = {"kind": "purge", "params": {"checkpoint_id": number}}
    job = catalog.http.post(f"{API}/jobs", json=order).json()["id"]
    for spoil in (is_emptied, is_removed, is_a_link_elsewhere):
        spoil(catalog.place(""))
        for _ in range(2 if spoil is is_a_link_elsewhere else 0):  # a link is noticed by a scan
            catalog.worker.scan("main")
        for _ in range(2):
            if (made := catalog.worker.claim()) is not None:
                catalog.worker.complete(made, catalog.worker.carry_out(made))
        assert catalog.get(f"/jobs/{job}")["state"] in ("queued", "planning", "running")
        assert catalog.states()["run/step-1"] == "deleted"
        put_back(catalog.place(""))
    catalog.work()
    assert catalog.get(f"/jobs/{job}")["state"] == "succeeded"
    assert catalog.states()["run/step-1"] == "purged"


def test_large_losses_need_a_confirmation(catalog: Catalog) -> None:
    """A loss of 12 of 40 needs a confirmation of this number, also after the root has grown."""
    for run in range(4):
        for step in range(10):
            catalog.save(f"run-{run}/step-{step}")
    catalog.scan()
    shutil.rmtree(catalog.place("run-0"))
    for step in range(2):
        shutil.rmtree(catalog.place(f"run-1/step-{step}"))
    report = catalog.scan()
    assert (report["vanished"], report["known"], report["lost"]) == (0, 40, 12)
    for step in range(40):
        catalog.save(f"run-new/step-{step}")
    for _ in range(2):
        assert (catalog.scan()["vanished"], root_of(catalog)["lost"]) == (0, 12)
    order = {"kind": "scan", "params": {"root": "main", "accept_lost": 12}}
    writer = catalog.app.client("read", "write")
    refused = writer.post(f"{API}/jobs", json=order)
    assert (refused.status_code, refused.json()["scope"]) == (403, "delete")
    assert catalog.scan(accept_lost=11)["lost"] == 12
    report = catalog.scan(accept_lost=12)
    assert (report["vanished"], report["lost"]) == (12, 0)
    assert catalog.states()["run-0/step-3"] == "vanished"
    assert root_of(catalog)["scan_error"] is None


def test_small_losses_need_no_confirmation(catalog: Catalog) -> None:
    """A loss of up to a fifth of all checkpoints, or of fewer than ten, needs no confirmation."""
    for run, known in (("a", 11), ("b", 49)):
        for step in range(known):
            catalog.save(f"{run}/step-{step}")
    catalog.scan()
    for run, gone, below, vanished in (("a", 9, "", 9), ("b", 12, "", 0)):
        for step in range(gone):
            shutil.rmtree(catalog.place(f"{run}/step-{step}"))
        assert catalog.scan(below=below)["vanished"] == vanished


def test_rotated_steps_need_no_confirmation(catalog: Catalog) -> None:
    """A run that keeps its newest steps loses old steps without confirmation, also alone in a root."""
    for step in range(20):
        catalog.save(f"run/step-{step}")
    catalog.scan()
    for step in range(20):
        shutil.rmtree(catalog.place(f"run/step-{step}"))
        catalog.save(f"run/step-{step + 20}")
    report = catalog.scan()
    assert (report["new"], report["vanished"], report["lost"]) == (20, 20, 0)
