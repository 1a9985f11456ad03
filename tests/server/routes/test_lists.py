"""Lists say why they are empty: filters that name what there is not, and roots that nobody has looked at."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dcp.server.jobs.kinds.shared.scans import scan_spec
from dcp.server.jobs.ledger import submit
from dcp.server.roots import Roots
from dcp.server.scanning.scanner import Scanner
from tests.support.app import App
from tests.support.catalog_roots import write_manifest

API = "/api/v1"


@pytest.fixture
def runs(app: App, tmp_path: Path) -> App:
    """Two roots with a run each, whose metrics differ, both of them scanned."""
    write_manifest(tmp_path / "main" / "team" / "tuned" / "step-1", user={"metrics": {"loss": 1.0}})
    write_manifest(tmp_path / "other" / "secret" / "step-1", user={"metrics": {"hidden_loss": 1.0}})
    scanner = Scanner(app.service.database, Roots(app.service.settings.roots))
    for root in ("main", "other"):
        scanner.scan(root)
    return app


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("checkpoints?root=mian", "root: there is no root 'mian'; did you mean 'main'?"),
        ("runs?root=mian", "root: there is no root 'mian'; did you mean 'main'?"),
        ("jobs?root=mian", "root: there is no root 'mian'; did you mean 'main'?"),
        ("checkpoints?run=team/tunde", "run: there is no run 'team/tunde'; did you mean 'team/tuned'?"),
        ("checkpoints?run=tuned", "run: there is no run 'tuned'; did you mean 'team/tuned'?"),
        ("checkpoints?run=nonsense", "run: there is no run 'nonsense'"),
        ("checkpoints?run=secret&root=main", "run: there is no run 'secret'"),
        ("checkpoints?run_id=999", "run_id: there is no run 999"),
        ("checkpoints?metric=los<1", "metric: there is no metric 'los'; did you mean 'loss'?"),
        ("checkpoints?sort=metric:Loss", "metric: there is no metric 'Loss'; did you mean 'loss'?"),
        ("checkpoints?state=any&sort=-metric:nonsense", "metric: there is no metric 'nonsense'"),
        ("jobs?kind=verfy", "there is no kind of job 'verfy': "),
    ],
)
def test_what_there_is_not_is_an_error(runs: App, path: str, says: str) -> None:
    """422 with what may have been meant."""
    answer = runs.client("read").get(f"{API}/{path}")
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"].startswith(says)


def test_what_there_is_may_be_asked_for(runs: App) -> None:
    """Also with patterns that nothing matches, and values that no metric has: then a list is just empty."""
    client = runs.client("read")
    for query, found in (
        ("root=main&run=team/tuned&metric=loss<2&sort=metric:loss", 1),
        ("run=team/tuned&root=other", None),
        ("metric=loss>2", 0),
        ("run_glob=nothing*", 0),
        ("tag=none", 0),
    ):
        answer = client.get(f"{API}/checkpoints?{query}")
        if found is None:
            assert answer.status_code == 422
        else:
            assert len(answer.json()["items"]) == found


def test_near_names_are_of_what_may_be_seen(runs: App) -> None:
    """A key for one root does not learn what others are called, nor that there is anything."""
    client = runs.client("read", roots=["main"])
    for query in ("root=othr", "root=other", "run=secre", "run=secret", "sort=metric:hidden_los"):
        answer = client.get(f"{API}/checkpoints?{query}")
        assert answer.status_code == 422
        named = query.rpartition("=")[2].removeprefix("metric:")
        assert "did you mean" not in answer.json()["detail"].replace("'loss'", ""), answer.text
        assert named in answer.json()["detail"]
    known = client.get(f"{API}/checkpoints?sort=metric:hidden_loss")
    assert (known.status_code, "there is no metric" in known.json()["detail"]) == (422, True)


def test_the_first_scan_is_running(app: App, tmp_path: Path) -> None:
    """Said in lists until it has ended; a run that is not known yet is no mistake until then. A scan that
    failed is said, too."""
    client = app.client("read")
    note = "the first scan of root main has not ended: what is in it may be missing"
    for path in ("checkpoints", "runs", "checkpoints?root=main"):
        assert note in client.get(f"{API}/{path}").json()["notes"]
    assert client.get(f"{API}/checkpoints?run=coming").json()["items"] == []
    scanner = Scanner(app.service.database, Roots(app.service.settings.roots))
    scanner.scan("main")
    assert client.get(f"{API}/checkpoints?root=main").json() == {
        "items": [],
        "next_cursor": None,
        "notes": [],
    }
    assert client.get(f"{API}/checkpoints?root=main&run=coming").status_code == 422
    shutil.rmtree(tmp_path / "main")
    with pytest.raises(Exception, match="not there"):
        scanner.scan("main")
    assert client.get(f"{API}/runs?root=main").json()["notes"] == [
        "the last scan of root main: the folder of root main is not there"
    ]


def test_scans_of_the_service_are_not_listed(app: App) -> None:
    """They come each minute. Those that somebody has asked for are, and all where a filter says so."""
    reader = app.client("read")
    with app.service.database.write() as connection:
        own = submit(connection, scan_spec("main", created_by="system"), 1.0)
    order = {"kind": "scan", "params": {"root": "main", "below": "run"}}
    asked = app.client("read", "write").post(f"{API}/jobs", json=order).json()["id"]

    def listed(query: str = "") -> list[int]:
        return [job["id"] for job in reader.get(f"{API}/jobs{query}").json()["items"]]

    assert listed() == listed("?root=main") == [asked]
    for query in ("?scans=true", "?kind=scan"):
        assert listed(query) == [asked, own]
    assert listed("?created_by=system") == [own]
    first = reader.get(f"{API}/jobs?scans=true&limit=1").json()
    assert listed(f"?scans=true&limit=1&cursor={first['next_cursor']}") == [own]


def test_a_tensor_by_fqn_or_name(runs: App) -> None:
    """`fqn` is what everything else calls it; the older `name` is still taken; one of them is needed."""
    client = runs.client("read")
    number = client.get(f"{API}/checkpoints?root=main").json()["items"][0]["id"]
    url = f"{API}/checkpoints/{number}/tensors/data"
    details = {
        query: client.get(f"{url}?{query}").json()["detail"]
        for query in ("fqn=nothing", "name=nothing", "fqn=nothing&name=nothing", "", "fqn=a&name=b")
    }
    assert details["fqn=nothing"] == details["name=nothing"] == details["fqn=nothing&name=nothing"]
    assert "which tensor?" in details[""]
    assert "two words for one thing" in details["fqn=a&name=b"]
