"""Tests of lists and details of checkpoints and runs over HTTP, and of registration."""

from __future__ import annotations

import time

import numpy as np
from safetensors.numpy import save_file

from dcp.server.app import API
from dcp.server.schemas.common import rfc3339
from tests.support.app import App
from tests.support.catalog_rows import T0, add_checkpoint


def test_lists_are_paged_without_gap_or_double(app: App) -> None:
    """All pages together are all checkpoints, in order; a cursor is good for its own query only."""
    ids = [add_checkpoint(app.service.database, f"run/step-{step}") for step in range(1, 8)]
    client = app.client("read")
    for sort in ("-time", "time", "-step", "step", "bytes", "name"):
        found: list[int] = []
        cursor = None
        while True:
            given = {"sort": sort, "limit": "3"} | ({"cursor": cursor} if cursor else {})
            page = client.get(f"{API}/checkpoints", params=given).json()
            found += [item["id"] for item in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert found == (ids[::-1] if sort.startswith("-") else ids), sort
    first = client.get(f"{API}/checkpoints", params={"limit": "3"}).json()
    for params in (
        {"sort": "step"},
        {"root": "main"},
        {"cursor": first["next_cursor"] + "A"},
        {"cursor": "x"},
    ):
        given = {"limit": "3", "cursor": first["next_cursor"], **params}
        answer = client.get(f"{API}/checkpoints", params=given)
        assert answer.status_code == 422, (params, answer.text)


def test_filters(app: App) -> None:
    """Each leaves what it says; several all hold."""
    database = app.service.database
    one = add_checkpoint(database, "runs/a/step-1", metrics={"loss": 2.0}, tags=frozenset({"keep", "x"}))
    two = add_checkpoint(database, "runs/a/step-2", metrics={"loss": 1.0}, tags=frozenset({"keep"}))
    model = add_checkpoint(database, "export.safetensors", format="safetensors", structure=None)
    broken = add_checkpoint(database, "runs/b/step-3", state="unreadable", problem="cut off", structure=None)
    other = add_checkpoint(database, "runs/c/step-4", root="other")
    client = app.client("admin")
    client.put(f"{API}/checkpoints/{two}/pin")
    run = client.get(f"{API}/checkpoints/{one}").json()["run_id"]
    client.put(f"{API}/runs/{run}/aliases/best", json={"checkpoint_id": two})
    for query, expected in (
        ({}, {one, two, model, other}),
        ({"state": "any"}, {one, two, model, broken, other}),
        ({"state": ["unreadable", "vanished"]}, {broken}),
        ({"root": "other"}, {other}),
        ({"run": "runs/a"}, {one, two}),
        ({"run_id": run}, {one, two}),
        ({"run_contains": "ns/a"}, {one, two}),
        ({"run_glob": "runs/[ac]"}, {one, two, other}),
        ({"min_step": 2}, {two, other}),
        ({"min_step": 1, "max_step": 2}, {one, two}),
        ({"since": rfc3339(T0 + 2), "until": rfc3339(T0 + 4)}, {two}),
        ({"since": "2023-11-14T23:13:22+01:00", "until": rfc3339(T0 + 4)}, {two}),
        ({"format": "safetensors"}, {model}),
        ({"tag": "keep"}, {one, two}),
        ({"tag": ["keep", "x"]}, {one}),
        ({"alias": "best"}, {two}),
        ({"metric": "loss<1.5"}, {two}),
        ({"metric": ["loss>=1", "loss<=1.5"]}, {two}),
        ({"dtype": "bfloat16"}, {one, two, other}),
        ({"tensor": "model.weight"}, {one, two, other}),
        ({"tensor": "model.w*"}, {one, two, other}),
        ({"tensor": "nothing"}, set()),
        ({"name_contains": "ep-"}, {one, two, other}),
        ({"name_glob": "*.safetensors"}, {model}),
        ({"pinned": "true"}, {two}),
        ({"verification": "good"}, set()),
    ):
        answer = client.get(f"{API}/checkpoints", params=query)
        assert answer.status_code == 200, (query, answer.text)
        assert {item["id"] for item in answer.json()["items"]} == expected, query
    order = client.get(f"{API}/checkpoints", params={"sort": "metric:loss"}).json()["items"]
    assert [item["id"] for item in order] == [two, one]


def test_queries_that_are_none(app: App) -> None:
    """Typing errors are told, not taken for another question."""
    client = app.client("read")
    for query in (
        {"stat": "any"},
        {"state": "gone"},
        {"format": "zip"},
        {"limit": "0"},
        {"limit": "501"},
        {"limit": "x"},
        {"min_step": "-1"},
        {"max_step": str(2**63)},
        {"since": "yesterday"},
        {"since": "2026-01-31T12:00:00"},
        {"since": "2026-02-31T12:00:00Z"},
        {"since": "1700000000"},
        {"metric": "loss"},
        {"metric": "loss<nan"},
        {"sort": "colour"},
        {"sort": "metric:"},
        {"sort": "metric"},
        {"name_glob": "[" * 300},
        {"root": "../etc"},
        {"dtype": "a b"},
        {"pinned": "maybe"},
        {"cursor": ""},
    ):
        answer = client.get(f"{API}/checkpoints", params=query)
        assert answer.status_code == 422, (query, answer.text)
        assert answer.json()["errors"], query


def test_keys_for_some_roots_see_those_only(app: App) -> None:
    """Neither lists nor cursors nor runs tell of another root."""
    database = app.service.database
    mine, other = add_checkpoint(database, "run/step-1"), add_checkpoint(database, "run/step-1", root="other")
    client, whole = app.client("read", roots=["main"]), app.client("read", name="all")
    assert [item["id"] for item in client.get(f"{API}/checkpoints").json()["items"]] == [mine]
    for path in ("checkpoints", "checkpoints?state=any", "runs", "jobs"):  # as of one that there is not
        for root in ("other", "nowhere"):
            answer = client.get(f"{API}/{path}", params={"root": root})
            assert (answer.status_code, answer.json()["detail"]) == (422, f"root: there is no root {root!r}")
    assert client.get(f"{API}/checkpoints/{other}").status_code == 404
    runs = {run["root"]: run["id"] for run in whole.get(f"{API}/runs").json()["items"]}
    assert set(runs) == {"main", "other"}
    assert [run["root"] for run in client.get(f"{API}/runs").json()["items"]] == ["main"]
    assert client.get(f"{API}/runs/{runs['other']}").status_code == 404
    assert client.get(f"{API}/runs/{runs['main']}").json()["checkpoint_count"] == 1
    for query in ({"run_id": runs["other"]}, {"run_id": runs["other"], "state": "any"}):
        assert client.get(f"{API}/checkpoints", params=query).json()["items"] == []


def test_runs(app: App) -> None:
    """Runs with what they hold, in several orders, by part and glob of their key, page by page."""
    database = app.service.database
    for key in ("a/step-1", "a/step-5", "b/step-3", "c/d/step-2"):
        add_checkpoint(database, key)
    client = app.client("read")

    def keys(**query: str) -> list[str]:
        return [run["key"] for run in client.get(f"{API}/runs", params=query).json()["items"]]

    assert keys() == ["a", "b", "c/d"]
    assert keys(sort="key") == ["a", "b", "c/d"]
    assert keys(sort="-checkpoints")[0] == "a"
    assert keys(contains="/") == ["c/d"]
    assert keys(glob="[ab]") == ["a", "b"]
    page = client.get(f"{API}/runs", params={"limit": "2"}).json()
    rest = client.get(f"{API}/runs", params={"limit": "2", "cursor": page["next_cursor"]}).json()
    assert [run["key"] for run in page["items"] + rest["items"]] == ["a", "b", "c/d"]
    assert rest["next_cursor"] is None
    run = page["items"][0]
    assert (run["latest_step"], run["checkpoint_count"], run["bytes"]) == (5, 2, 106)
    for query in ({"sort": "x"}, {"cursor": "x"}, {"more": "1"}, {"glob": ""}):
        assert client.get(f"{API}/runs", params=query).status_code == 422, query


def test_registration(app: App, tmp_path: object) -> None:
    """The service looks for itself; saying it again changes nothing; what is not there is 404."""
    root = app.service.roots.get("main").path
    assert root is not None
    (root / "run" / "step-7").mkdir(parents=True)
    save_file({"weight": np.ones((2, 2), np.float32)}, root / "run" / "step-7" / "model.safetensors")
    client = app.client("read", "write", name="trainer")
    body = {"root": "main", "key": "run/step-7", "metrics": {"loss": 0.5}, "tags": ["nightly"]}
    first = client.post(f"{API}/checkpoints", json=body)
    assert first.status_code == 201, first.text
    path = first.headers["location"]
    detail = client.get(path).json()
    assert (detail["format"], detail["step"], detail["bytes"] > 0) == ("safetensors", 7, True)
    assert (detail["metrics"], detail["tags"], detail["tensor_count"]) == ({"loss": 0.5}, ["nightly"], 1)
    again = client.post(f"{API}/checkpoints", json=body)
    assert (again.status_code, again.headers["location"]) == (200, path)
    assert client.get(path).json()["etag"] == detail["etag"]
    by_url = {"root_url": str(root / "run"), "key": "step-7"}
    assert client.post(f"{API}/checkpoints", json=by_url).json()["id"] == detail["id"]
    for wrong, status in (
        ({"root": "main", "key": "run/step-8"}, 404),
        ({"root": "nowhere", "key": "run/step-7"}, 404),
        ({"root_url": "/somewhere/else", "key": "step-7"}, 404),
        ({"root_url": "file://[", "key": "step-7"}, 404),
        ({"root": "main", "key": "../run/step-7"}, 422),
        ({"root": "main", "key": "/etc"}, 422),
        ({"key": "run/step-7"}, 422),
        ({"root": "main", "root_url": str(root), "key": "run/step-7"}, 422),
        ({"root": "main", "key": "run/step-7", "metrics": {"a b": 1}}, 422),
    ):
        assert client.post(f"{API}/checkpoints", json=wrong).status_code == status, wrong
    assert app.client("read").post(f"{API}/checkpoints", json=body).status_code == 403
    hidden = app.client("write", roots=["other"])
    assert hidden.post(f"{API}/checkpoints", json=body).status_code == 404
    assert hidden.post(f"{API}/checkpoints", json=by_url).status_code == 404


def test_a_post_that_is_repeated_is_done_once(app: App) -> None:
    """The same Idempotency-Key gives the same answer; another caller's is another one."""
    root = app.service.roots.get("main").path
    assert root is not None
    save_file({"weight": np.ones(3, np.float32)}, root / "model.safetensors")
    client = app.client("write", name="a")
    body = {"root": "main", "key": "model.safetensors"}
    key = {"Idempotency-Key": "one"}
    first = client.post(f"{API}/checkpoints", json=body, headers=key)
    again = client.post(f"{API}/checkpoints", json=body, headers=key)
    assert first.status_code == again.status_code == 201
    assert again.json() == first.json()
    assert again.headers["location"] == first.headers["location"]
    assert (first.headers.get("idempotency-replayed"), again.headers["idempotency-replayed"]) == (
        None,
        "true",
    )
    other = {"root": "main", "key": "other.safetensors"}
    assert client.post(f"{API}/checkpoints", json=other, headers=key).status_code == 422
    # another one's key is another key
    assert app.client("write", name="b").post(f"{API}/checkpoints", json=body, headers=key).status_code == 200
    # what changed nothing may be tried again
    missing = {"Idempotency-Key": "two"}
    assert client.post(f"{API}/checkpoints", json=other, headers=missing).status_code == 404
    save_file({"weight": np.ones(3, np.float32)}, root / "other.safetensors")
    assert client.post(f"{API}/checkpoints", json=other, headers=missing).status_code == 201
    for wrong in ("", "x" * 129, "a b"):
        answer = client.post(f"{API}/checkpoints", json=body, headers={"Idempotency-Key": wrong})
        assert answer.status_code == 400, wrong


def test_times_are_told_whatever_they_are(app: App) -> None:
    """A file whose time is far off does not keep its neighbours from being listed."""
    add_checkpoint(app.service.database, "run/step-1", committed_seconds=1e11)
    add_checkpoint(app.service.database, "run/step-2", committed_seconds=time.time())
    assert len(app.client("read").get(f"{API}/checkpoints").json()["items"]) == 2
