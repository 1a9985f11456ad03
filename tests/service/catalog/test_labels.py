"""Tags, pins, metrics and aliases: versions, ETags, audit entries and refused changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.catalog import API, Catalog, pages

ANY = {"If-Match": "*"}


def test_each_change_has_an_etag_and_an_audit_entry(catalog: Catalog) -> None:
    """A change returns a new ETag and is audited; a change without effect keeps the ETag."""
    number = catalog.add("run/step-1")
    path = f"{API}/checkpoints/{number}"
    client = catalog.app.client("read", "write", name="trainer")
    seen = [client.get(path).headers["etag"]]

    def change(method: str, below: str, **options: Any) -> Any:
        answer = client.request(method, f"{path}/{below}", **options)
        assert answer.status_code == 200, answer.text
        assert answer.headers["etag"] == answer.json()["etag"]
        assert client.get(path).json() == answer.json()
        seen.append(answer.headers["etag"])
        return answer.json()

    assert change("PUT", "tags/good/one")["tags"] == ["good/one"]
    metrics = {"loss": 1.5, "eval/bleu": 3}
    assert change("PATCH", "metrics", json={"metrics": metrics})["metrics"] == metrics
    assert change("PATCH", "metrics", json={"metrics": {"loss": None}})["metrics"] == {"eval/bleu": 3.0}
    assert change("PUT", "pin")["is_pinned"] is True
    assert change("DELETE", "pin")["is_pinned"] is False
    assert change("DELETE", "tags/good/one")["tags"] == []
    assert len(set(seen)) == len(seen)
    assert change("DELETE", "tags/good/one")["etag"] == seen[-2]
    entries = pages(catalog.http, "/audit", actor="key:trainer", limit=2)
    words = ["tag", "metrics", "metrics", "pin", "unpin", "untag"]
    assert [entry["action"] for entry in reversed(entries)] == [f"checkpoint.{word}" for word in words]
    assert all(entry["request_id"] and entry["address"] == "testclient" for entry in entries)


def test_if_match_and_if_none_match(catalog: Catalog) -> None:
    """A stale If-Match gets 412 and changes nothing; If-None-Match with the current ETag gets 304."""
    number = catalog.add("run/step-1")
    path = f"{API}/checkpoints/{number}"
    first = catalog.http.get(path).headers["etag"]
    second = catalog.http.put(f"{path}/tags/a", headers={"If-Match": first}).headers["etag"]
    for stale in (first, f"W/{second}", '"c0-1"', '"x"', "nonsense", f'"c{number + 1}-1"'):
        for method, below in (("PUT", "tags/b"), ("DELETE", "tags/a"), ("PUT", "pin"), ("DELETE", "")):
            answer = catalog.http.request(method, f"{path}/{below}".rstrip("/"), headers={"If-Match": stale})
            assert answer.status_code == 412, (stale, method, below)
    assert catalog.http.get(path).json()["tags"] == ["a"]
    assert catalog.http.put(f"{path}/tags/b", headers={"If-Match": f'"c0-1", {second}'}).status_code == 200
    assert catalog.http.put(f"{path}/tags/c", headers=ANY).status_code == 200
    etag = catalog.http.get(path).headers["etag"]
    again = catalog.http.get(path, headers={"If-None-Match": f"W/{etag}"})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    catalog.http.put(f"{path}/pin")
    assert catalog.http.get(path, headers={"If-None-Match": etag}).status_code == 200


def test_changing_an_alias_needs_if_match(catalog: Catalog) -> None:
    """Changing an alias needs If-Match. A stale ETag gets 412, also for an alias deleted and made again."""
    ids = [catalog.add(f"run/step-{step}") for step in (1, 2, 3)]
    run = catalog.get(f"/checkpoints/{ids[0]}")["run_id"]
    client, path = catalog.http, f"{API}/runs/{run}/aliases/best"
    assert client.get(path).status_code == 404
    assert client.put(path, json={"checkpoint_id": ids[0]}, headers=ANY).status_code == 412
    first = client.put(path, json={"checkpoint_id": ids[0]})
    assert first.status_code == 200, first.text
    assert client.put(path, json={"checkpoint_id": ids[1]}).status_code == 428
    seen = {"If-Match": first.headers["etag"]}
    assert client.put(path, json={"checkpoint_id": ids[1]}, headers=seen).status_code == 200
    assert client.put(path, json={"checkpoint_id": ids[2]}, headers=seen).status_code == 412
    assert client.get(path).json()["checkpoint_id"] == ids[1]
    assert [catalog.get(f"/checkpoints/{number}")["aliases"] for number in ids] == [[], ["best"], []]
    assert [one["name"] for one in catalog.get(f"/runs/{run}/aliases")["items"]] == ["best"]
    assert client.delete(path).status_code == 428
    assert client.delete(path, headers=seen).status_code == 412
    assert [client.delete(path, headers=ANY).status_code for _ in range(2)] == [204, 404]
    # the new alias has version 1 again, but the first ETag belongs to another checkpoint
    assert client.put(path, json={"checkpoint_id": ids[2]}).status_code == 200
    assert client.put(path, json={"checkpoint_id": ids[1]}, headers=seen).status_code == 412
    other = catalog.add("else/step-1")
    assert client.put(path, json={"checkpoint_id": other}, headers=ANY).status_code == 404


def test_protected_aliases_need_admin(catalog: Catalog) -> None:
    """Only an admin may protect an alias, and move, unprotect or delete a protected alias."""
    ids = [catalog.add(f"run/step-{step}") for step in (1, 2)]
    run = catalog.get(f"/checkpoints/{ids[0]}")["run_id"]
    writer, admin = catalog.app.client("read", "write"), catalog.http
    path = f"{API}/runs/{run}/aliases/production"
    protected = {"checkpoint_id": ids[0], "is_protected": True}
    assert writer.put(path, json=protected).status_code == 403
    assert admin.put(path, json=protected).status_code == 200
    freed = {"checkpoint_id": ids[0], "is_protected": False}
    for body in ({"checkpoint_id": ids[1]}, freed):
        assert writer.put(path, json=body, headers=ANY).status_code == 403
    assert writer.delete(path, headers=ANY).status_code == 403
    assert admin.put(path, json={"checkpoint_id": ids[1]}, headers=ANY).json()["is_protected"] is True
    assert admin.delete(path, headers=ANY).status_code == 204


@pytest.mark.each_database
def test_concurrent_label_changes_are_all_kept(catalog: Catalog) -> None:
    """Concurrent changes do not overwrite each other: each gets a version of its own."""
    path = f"/checkpoints/{catalog.add('run/step-1')}"
    before = catalog.get(path)["version"]
    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(lambda number: catalog.status("PUT", f"{path}/tags/t{number}"), range(18))
        assert list(answers) == [200] * 18
    found = catalog.get(path)
    assert (len(found["tags"]), found["version"]) == (18, before + 18)


def test_deletions_are_restored_within_the_grace_period(catalog: Catalog) -> None:
    """A deletion returns its purge time and is idempotent; a pin or a stale If-Match prevents deletion."""
    number = catalog.add("run/step-1")
    path = f"{API}/checkpoints/{number}"
    client = catalog.app.client("delete", "read", "write")
    first = client.get(path).headers["ETag"]
    assert client.put(f"{path}/pin").status_code == 200
    assert client.delete(path, headers={"If-Match": first}).status_code == 412
    assert client.delete(path).status_code == 409
    assert client.delete(f"{path}/pin").status_code == 200
    gone = client.delete(path)
    assert gone.status_code == 200 and gone.json()["purge_after"] is not None
    assert client.delete(path).json() == gone.json()
    assert client.get(f"{path}/download").status_code == 410
    assert catalog.get("/checkpoints")["items"] == []
    restored = client.post(f"{path}/restore")
    assert (restored.status_code, restored.json()["state"]) == (200, "committed")
    assert client.post(f"{path}/restore").status_code == 409
    for wrong in ("-1", "nan", "inf", "1e20", "x"):
        assert client.delete(path, params={"grace_seconds": wrong}).status_code == 422, wrong
    at_once = client.delete(path, params={"grace_seconds": 0}).json()
    assert at_once["purge_after"] == at_once["deleted_at"]
    actions = {one["action"] for one in pages(catalog.http, "/audit", target=f"checkpoint:{number}")}
    assert {"checkpoint.delete", "checkpoint.restore"} <= actions
