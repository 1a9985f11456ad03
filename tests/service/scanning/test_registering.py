"""Registration: trainers report a place, and the service reads the checkpoint itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import dcp
from tests.support.app import running_app
from tests.support.catalog import API, Catalog
from tests.support.databases import MakeDatabase
from tests.support.s3 import S3Server


def register(catalog: Catalog, key: str, **more: Any) -> Any:
    """Register a checkpoint, and return the response."""
    place = {} if "root_url" in more else {"root": "main"}
    return catalog.http.post(f"{API}/checkpoints", json={"key": key, **place, **more})


def test_a_registration_is_read_by_the_server(catalog: Catalog) -> None:
    """The manifest has precedence; a given step fills a missing one, tags and metrics are added."""
    catalog.save("run/last", save_id="a", user={"metrics": {"loss": 2.0}})
    answer = register(catalog, "run/last", step=7, tags=["t"], metrics={"acc": 0.5}, save_id="b")
    assert (answer.status_code, answer.json()["is_new"], answer.json()["save_id"]) == (201, True, "a")
    detail = catalog.http.get(answer.headers["Location"]).json()
    assert (detail["step"], detail["bytes"], detail["format"]) == (7, 192, "dcp")
    assert (detail["metrics"], detail["tags"]) == ({"loss": 2.0, "acc": 0.5}, ["t"])
    catalog.save("run/step-1", user={"step": 5})
    register(catalog, "run/step-1", step=9)
    assert catalog.rows()["run/step-1"]["step"] == 5


def test_repeated_registrations_leave_one_row(catalog: Catalog) -> None:
    """Registering twice, or scanning after a registration, leaves the same unchanged row."""
    catalog.save("run/step-1", seconds=None)
    first, again = register(catalog, "run/step-1"), register(catalog, "run/step-1")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.headers["Location"] == again.headers["Location"]
    before = catalog.rows()["run/step-1"]
    report = catalog.scan()
    assert (report["new"], report["committed"]) == (0, 0)
    assert catalog.rows()["run/step-1"]["version"] == before["version"]


def test_uncommitted_data_is_not_registered(catalog: Catalog) -> None:
    """A missing checkpoint gets 404, and data without a commit 409, until the commit."""
    assert register(catalog, "run/step-1").status_code == 404
    folder = catalog.place("run/step-1")
    folder.mkdir(parents=True)
    (folder / "__0_0.0000abcd.distcp").write_bytes(b"x")
    assert register(catalog, "run/step-1").status_code == 409
    assert catalog.rows() == {}
    catalog.save("run/step-1")
    assert register(catalog, "run/step-1").status_code == 201


def test_reported_deletions_are_checked(catalog: Catalog) -> None:
    """A reported deletion is checked: present files stay, missing files vanish, unknown keys are accepted."""
    catalog.add("run/step-1")
    assert register(catalog, "run/step-1", deleted=True).json()["is_present"]
    assert catalog.states() == {"run/step-1": "committed"}
    shutil.rmtree(catalog.place("run/step-1"))
    assert not register(catalog, "run/step-1", deleted=True).json()["is_present"]
    assert catalog.states() == {"run/step-1": "vanished"}
    assert register(catalog, "run/step-2", deleted=True).json()["id"] is None


def test_urls_belong_to_the_innermost_root(
    make_database: MakeDatabase, tmp_path: Path, s3_server: S3Server, s3_root: str
) -> None:
    """Root and key are derived from a path or URL, with the innermost root and any scheme of S3."""
    options, bucket = s3_server.storage_options, s3_root.removeprefix("s3://")
    main = f"{tmp_path}/main"
    roots: dict[str, Any] = {"main": {"url": main}, "inner": {"url": f"{main}/inner"}}
    roots["bucket"] = {"url": f"{s3_root}/runs", "storage_options": options}
    for place in (f"{main}/run", f"{main}/inner/run"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{place}/step-1", no_dist=True)
    there = f"{s3_root}/runs/a/step-1"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=there, storage_options=options, no_dist=True)
    with running_app(make_database(), tmp_path, roots=roots) as app:
        catalog = Catalog(app, tmp_path)
        for url, key, found in (
            *((url, "step-1", ("main", "run/step-1")) for url in (f"{main}/run", f"file://{main}/run/")),
            (main, "run/step-1", ("main", "run/step-1")),
            (f"{main}/inner/run", "step-1", ("inner", "run/step-1")),
            *((f"{s}://{bucket}/runs/a", "step-1", ("bucket", "a/step-1")) for s in ("s3", "s3a", "S3")),
        ):
            answer = register(catalog, key, root_url=url)
            assert answer.is_success, answer.text
            assert (answer.json()["root"], answer.json()["key"]) == found
        for url in (f"s3://{bucket}/runs-of-others", f"s3://{bucket}", f"s3://{bucket.split('/')[0]}"):
            assert register(catalog, "step-1", root_url=url).status_code == 404, url


def test_urls_outside_of_all_roots_are_refused(catalog: Catalog) -> None:
    """URLs outside of all roots, two places or none, and hidden roots are refused."""
    catalog.save("run/step-1")
    main = str(catalog.place("")).rstrip("/")
    for url in ("/etc", "s3://bucket", "relative", "", f"{main}x/run", "file://["):
        assert register(catalog, "step-1", root_url=url).status_code in (404, 422), url
    for wrong in ({"root": "main", "root_url": main}, {}, {"root": "main", "metrics": {"a b": 1}}):
        assert catalog.status("POST", "/checkpoints", json={"key": "run/step-1", **wrong}) == 422, wrong
    stranger = catalog.app.client("write", roots=["other"])
    for place in ({"root": "main", "key": "run/step-1"}, {"root_url": f"{main}/run", "key": "step-1"}):
        assert catalog.status("POST", "/checkpoints", stranger, json=place) == 404
    assert catalog.rows() == {}
