"""A root that is not there. Internal: a deletion between two looks at a root is reached by no request.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dcp.cli.app import app as command_line
from dcp.server.catalog.labelling.labels import Change
from dcp.server.database.engine import Database
from dcp.server.jobs.kinds.shared.deletion import delete_softly
from dcp.server.problems import UnavailableError
from tests.support.app import App, running_app
from tests.support.catalog_roots import roots_of, rows, scan, write_manifest
from tests.support.kind_runs import KindRuns


def check_of_main(app: App) -> dict[str, Any]:
    """Of the root main, looked at anew; the service is ready whatever is found."""
    looks = app.app.state.readiness
    for probe in (looks._roots["main"], looks._catalog):
        probe._until_seconds = 0.0  # else an answer is kept for a moment
    assert app.base.get("/readyz").json() == {"status": "ok", "checks": {"database": "ok"}}
    answer = app.base.get("/api/v1/root-checks")
    (found,) = (item for item in answer.json()["items"] if item["root"] == "main")
    assert f'dcp_root_up{{root="main"}} {float(found["is_ok"])}' in app.base.get("/metrics").text
    return dict(found)


def _is_away(root: Path) -> None:
    root.rename(root.with_name("away"))


def _is_not_mounted(root: Path) -> None:
    _is_away(root)
    root.mkdir()


def _is_a_link_to_nothing(root: Path) -> None:
    _is_away(root)
    root.symlink_to(root.with_name("nothing"))


def _is_a_link_elsewhere(root: Path) -> None:
    _is_away(root)
    write_manifest(root.with_name("elsewhere") / "theirs" / "step-1")
    root.symlink_to(root.with_name("elsewhere"))


@pytest.mark.parametrize("spoil", [_is_away, _is_not_mounted, _is_a_link_to_nothing, _is_a_link_elsewhere])
def test_a_root_that_is_not_what_it_was(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """Its check says why, the service stays ready, the catalog is as before, and all is well again when the
    root is."""
    for step in (1, 2):
        write_manifest(tmp_path / "main" / "run" / f"step-{step}")
    with running_app(f"sqlite:///{tmp_path / 'a.sqlite'}", tmp_path, auth="off") as app:
        roots = roots_of(tmp_path / "main")
        scan(app.service.database, roots)
        assert check_of_main(app)["is_ok"]
        spoil(tmp_path / "main")
        for _ in range(2 if spoil is _is_a_link_elsewhere else 0):  # what is in it shows by a scan
            assert scan(app.service.database, roots).vanished == 0
        found = check_of_main(app)
        assert not found["is_ok"]
        assert found["detail"] and str(tmp_path) not in found["detail"]
        listed = app.base.get("/api/v1/checkpoints").json()["items"]
        assert {"run/step-1", "run/step-2"} <= {item["key"] for item in listed}
        root = tmp_path / "main"
        if root.is_symlink():
            root.unlink()
        elif root.exists():
            root.rmdir()
        (tmp_path / "away").rename(root)
        scan(app.service.database, roots)
        assert check_of_main(app)["is_ok"]


def test_requests_while_the_root_is_away(tmp_path: Path) -> None:
    """What needs its bytes is 503 and not "gone"; a trainer's word that one is deleted has to wait; a
    conversion makes no folder in the place of the root."""
    write_manifest(tmp_path / "main" / "run" / "step-1")
    with running_app(f"sqlite:///{tmp_path / 'a.sqlite'}", tmp_path, auth="off") as app:
        scan(app.service.database, roots_of(tmp_path / "main"))
        number = app.base.get("/api/v1/checkpoints").json()["items"][0]["id"]
        _is_away(tmp_path / "main")
        answer = app.base.get(f"/api/v1/checkpoints/{number}/files")
        assert (answer.status_code, "not there" in answer.json()["detail"]) == (503, True)
        told = {"root": "main", "key": "run/step-1", "deleted": True}
        assert app.base.post("/api/v1/checkpoints", json=told).status_code == 503
        assert rows(app.service.database)["run/step-1"]["state"] == "committed"
        assert not (tmp_path / "main").exists()


def test_a_purge_waits_for_the_disk(database: Database, tmp_path: Path) -> None:
    """What cannot be seen is not purged: it would come back with the disk, and nobody would know it."""
    for step in (1, 2):
        write_manifest(tmp_path / "main" / "run" / f"step-{step}")
    runs = KindRuns(database, tmp_path / "work", {"main": {"url": str(tmp_path / "main")}})
    runs.scan("main")
    number = runs.id("main", "run/step-1")
    database.transact(
        lambda connection: delete_softly(connection, number, 0.0, Change(actor="test", now=time.time()))
    )
    job = runs.submit("purge", checkpoint_id=number)
    for spoil in (_is_not_mounted, _is_away, _is_a_link_elsewhere):
        spoil(tmp_path / "main")
        if spoil is _is_a_link_elsewhere:  # which shows by a scan
            runs.scan("main")
        claim = runs.claim()
        assert claim is not None
        answer = runs.carry_out(claim)
        assert isinstance(answer, UnavailableError)
        runs.complete(claim, answer)
        assert runs.job(job).state == "queued"
        assert runs.row("main", "run/step-1").state == "deleted"
        if (tmp_path / "main").is_symlink():
            (tmp_path / "main").unlink()
        shutil.rmtree(tmp_path / "main", ignore_errors=True)
        (tmp_path / "away").rename(tmp_path / "main")
    runs.drain()
    assert runs.job(job).state == "succeeded"
    assert runs.row("main", "run/step-1").state == "purged"


def test_a_persons_word_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dcp roots` says what is in doubt; without --yes nothing is done, nor if more is missing by now."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCP_SERVER_CONFIG", str(tmp_path / "none.toml"))

    def run(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(command_line, ["roots", *arguments])
        assert done.exit_code == status, done.output
        return " ".join(done.output.split())

    for step in range(12):
        write_manifest(tmp_path / "main" / "run" / f"step-{step}")
        write_manifest(tmp_path / "main" / "other" / f"step-{step}")
    assert CliRunner().invoke(command_line, ["db", "upgrade"]).exit_code == 0
    # the root is one that `dcp serve --root` was given
    database, roots = Database(f"sqlite:///{tmp_path / 'dcp-catalog.sqlite'}"), roots_of(tmp_path / "main")
    scan(database, roots)
    assert "nothing is in doubt" in run("accept", "main")
    shutil.rmtree(tmp_path / "main" / "run")
    scan(database, roots)
    assert "12 of 24 checkpoints were not found" in run("list")
    assert "with --yes" in run("accept", "main")
    shutil.rmtree(tmp_path / "main" / "other")
    assert "nothing was marked" in run("accept", "main", "--yes", status=3)
    assert {row["state"] for row in rows(database).values()} == {"committed"}
    assert "24 marked as vanished; 0 are there" in run("accept", "main", "--yes")
    assert {row["state"] for row in rows(database).values()} == {"vanished"}
    assert "there is no root 'elsewhere': main" in run("accept", "elsewhere", status=3)
    database.close()


def test_a_persons_word_by_the_api(tmp_path: Path) -> None:
    """The root says how many are in doubt; a scan that accepts so many is for keys that may delete."""
    for step in range(3):
        write_manifest(tmp_path / "main" / "run" / f"step-{step}")
    with running_app(f"sqlite:///{tmp_path / 'a.sqlite'}", tmp_path) as app:
        roots = roots_of(tmp_path / "main")
        scan(app.service.database, roots)
        shutil.rmtree(tmp_path / "main" / "run")
        scan(app.service.database, roots)
        root = app.client("read").get("/api/v1/roots/main").json()
        assert (root["lost"], root["last_scan"]["known"]) == (3, 3)
        order = {"kind": "scan", "params": {"root": "main", "accept_lost": root["lost"]}}
        refused = app.client("read", "write").post("/api/v1/jobs", json=order)
        assert (refused.status_code, refused.json()["scope"]) == (403, "delete")
        answer = app.client("read", "write", "delete").post("/api/v1/jobs", json=order)
        assert answer.status_code == 202
        assert answer.json()["params"]["accept_lost"] == 3
    runs = KindRuns(app.service.database, tmp_path / "work", {"main": {"url": str(tmp_path / "main")}})
    job = runs.do("scan", root="main", accept_lost=3)
    assert job.result is not None and job.result["vanished"] == 3
