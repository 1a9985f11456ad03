"""Tests of tags, pins, metrics, aliases and lineage over HTTP."""

from __future__ import annotations

from dcp.server.app import API
from dcp.server.catalog import audit
from dcp.server.catalog.labelling.lineage import add_lineage
from tests.support.app import App
from tests.support.catalog_rows import add_checkpoint


def test_labels_change_a_checkpoint_and_its_etag(app: App) -> None:
    """Each change is seen by the next reader, gives another ETag, and is told in the audit log."""
    number = add_checkpoint(app.service.database, "run/step-1")
    path = f"{API}/checkpoints/{number}"
    client = app.client("read", "write", name="trainer")
    seen = [client.get(path).headers["etag"]]

    def change(method: str, below: str, **options: object) -> dict[str, object]:
        answer = client.request(method, f"{path}/{below}", **options)  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        assert answer.headers["etag"] == answer.json()["etag"]
        seen.append(answer.headers["etag"])
        assert client.get(path).json() == answer.json()
        return dict(answer.json())

    assert change("PUT", "tags/good/one")["tags"] == ["good/one"]
    assert change("PATCH", "metrics", json={"metrics": {"loss": 1.5, "eval/bleu": 3}})["metrics"] == {
        "eval/bleu": 3.0,
        "loss": 1.5,
    }
    assert change("PATCH", "metrics", json={"metrics": {"loss": None}})["metrics"] == {"eval/bleu": 3.0}
    assert change("PUT", "pin")["is_pinned"] is True
    assert change("DELETE", "pin")["is_pinned"] is False
    assert change("DELETE", "tags/good/one")["tags"] == []
    assert len(set(seen)) == len(seen)
    # nothing changes, nothing is written
    assert change("DELETE", "tags/good/one")["etag"] == seen[-2]
    with app.service.database.read() as connection:
        entries = audit.audit_page(connection, actor="key:trainer").entries
    assert [entry.action for entry in reversed(entries)] == [
        "checkpoint.tag",
        "checkpoint.metrics",
        "checkpoint.metrics",
        "checkpoint.pin",
        "checkpoint.unpin",
        "checkpoint.untag",
    ]
    assert all(entry.request_id and entry.address == "testclient" for entry in entries)


def test_if_match(app: App) -> None:
    """A change that has not seen the latest state is 412 and does nothing; ``*`` and lists are taken."""
    number = add_checkpoint(app.service.database, "run/step-1")
    path = f"{API}/checkpoints/{number}"
    client = app.client("read", "write")
    first = client.get(path).headers["etag"]
    second = client.put(f"{path}/tags/a", headers={"If-Match": first}).headers["etag"]
    for stale in (first, f"W/{second}", '"c0-1"', '"x"', "nonsense", f'"c{number + 1}-1"'):
        answer = client.put(f"{path}/tags/b", headers={"If-Match": stale})
        assert answer.status_code == 412, stale
    assert client.get(path).json()["tags"] == ["a"]
    assert client.put(f"{path}/tags/b", headers={"If-Match": f'"c0-1", {second}'}).status_code == 200
    assert client.put(f"{path}/tags/c", headers={"If-Match": "*"}).status_code == 200


def test_if_none_match(app: App) -> None:
    """What has not changed is not sent again."""
    number = add_checkpoint(app.service.database, "run/step-1")
    client = app.client("read", "write")
    path = f"{API}/checkpoints/{number}"
    etag = client.get(path).headers["etag"]
    again = client.get(path, headers={"If-None-Match": f"W/{etag}"})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    client.put(f"{path}/pin")
    assert client.get(path, headers={"If-None-Match": etag}).status_code == 200


def test_aliases_move_only_from_what_was_seen(app: App) -> None:
    """New ones need no If-Match, others do; the loser of two is told; a later one is another one."""
    ids = [add_checkpoint(app.service.database, f"run/step-{step}") for step in (1, 2, 3)]
    client = app.client("read", "write")
    run = client.get(f"{API}/checkpoints/{ids[0]}").json()["run_id"]
    path = f"{API}/runs/{run}/aliases/best"
    assert client.get(path).status_code == 404
    assert client.put(path, json={"checkpoint_id": ids[0]}, headers={"If-Match": "*"}).status_code == 412
    first = client.put(path, json={"checkpoint_id": ids[0]})
    assert first.status_code == 200, first.text
    assert client.put(path, json={"checkpoint_id": ids[1]}).status_code == 428
    seen = {"If-Match": first.headers["etag"]}
    assert client.put(path, json={"checkpoint_id": ids[1]}, headers=seen).status_code == 200
    assert client.put(path, json={"checkpoint_id": ids[2]}, headers=seen).status_code == 412
    assert client.get(path).json()["checkpoint_id"] == ids[1]
    assert client.get(f"{API}/checkpoints/{ids[1]}").json()["aliases"] == ["best"]
    assert client.get(f"{API}/checkpoints/{ids[0]}").json()["aliases"] == []
    assert [one["name"] for one in client.get(f"{API}/runs/{run}/aliases").json()["items"]] == ["best"]
    assert client.delete(path).status_code == 428
    assert client.delete(path, headers=seen).status_code == 412
    assert client.delete(path, headers={"If-Match": "*"}).status_code == 204
    assert client.delete(path, headers={"If-Match": "*"}).status_code == 404
    # the version counts from one again, but the first tag was of another checkpoint
    assert client.put(path, json={"checkpoint_id": ids[2]}).status_code == 200
    assert client.put(path, json={"checkpoint_id": ids[1]}, headers=seen).status_code == 412


def test_protected_aliases_need_admin(app: App) -> None:
    """Only an admin protects an alias, and moves or removes what is protected."""
    ids = [add_checkpoint(app.service.database, f"run/step-{step}") for step in (1, 2)]
    writer, admin = app.client("read", "write"), app.client("admin")
    run = writer.get(f"{API}/checkpoints/{ids[0]}").json()["run_id"]
    path = f"{API}/runs/{run}/aliases/production"
    any_state = {"If-Match": "*"}
    protected = {"checkpoint_id": ids[0], "is_protected": True}
    assert writer.put(path, json=protected).status_code == 403
    assert admin.put(path, json=protected).status_code == 200
    moved = {"checkpoint_id": ids[1]}
    assert writer.put(path, json=moved, headers=any_state).status_code == 403
    assert writer.delete(path, headers=any_state).status_code == 403
    assert admin.put(path, json=moved, headers=any_state).json()["is_protected"] is True
    assert admin.delete(path, headers=any_state).status_code == 204


def test_names_that_are_none(app: App) -> None:
    """Labels are plain names."""
    number = add_checkpoint(app.service.database, "run/step-1")
    client = app.client("write")
    for name in ("", "with space", "%C3%BCmlaut", "x" * 129, "-first", "a%09b", "a%00b"):
        answer = client.put(f"{API}/checkpoints/{number}/tags/{name}")
        assert answer.status_code in (400, 422), (name, answer.text)


def test_metrics_are_finite_numbers(app: App) -> None:
    """What a database or JSON could not hold is refused."""
    number = add_checkpoint(app.service.database, "run/step-1")
    client = app.client("write")
    huge = "1" + "0" * 400
    for metrics in (
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": -Infinity}',
        '{"a": "1"}',
        '{"a b": 1}',
        "{}",
        f'{{"a": {huge}}}',
    ):
        answer = client.patch(
            f"{API}/checkpoints/{number}/metrics",
            content=f'{{"metrics": {metrics}}}',
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 422, (metrics, answer.text)


def test_nothing_of_other_roots(app: App) -> None:
    """A key for one root can neither see nor change what is in another: 404, as if it were not there."""
    number = add_checkpoint(app.service.database, "run/step-1", root="other")
    whole = app.client("admin")
    run = whole.get(f"{API}/checkpoints/{number}").json()["run_id"]
    assert whole.put(f"{API}/runs/{run}/aliases/best", json={"checkpoint_id": number}).status_code == 200
    client = app.client("admin", roots=["main"])
    path = f"{API}/checkpoints/{number}"
    for method, place, body in (
        ("GET", path, None),
        ("GET", f"{path}/lineage", None),
        ("PUT", f"{path}/tags/a", None),
        ("DELETE", f"{path}/tags/a", None),
        ("PUT", f"{path}/pin", None),
        ("DELETE", f"{path}/pin", None),
        ("PATCH", f"{path}/metrics", {"metrics": {"a": 1}}),
        ("GET", f"{API}/runs/{run}/aliases", None),
        ("GET", f"{API}/runs/{run}/aliases/best", None),
        ("PUT", f"{API}/runs/{run}/aliases/best", {"checkpoint_id": number}),
        ("PUT", f"{API}/runs/{run}/aliases/new", {"checkpoint_id": number}),
        ("DELETE", f"{API}/runs/{run}/aliases/best", None),
    ):
        answer = client.request(method, place, json=body, headers={"If-Match": "*"})
        assert answer.status_code == 404, (method, place, answer.text)
    after = whole.get(path).json()
    assert (after["tags"], after["is_pinned"], after["metrics"], after["aliases"]) == (
        [],
        False,
        {},
        ["best"],
    )


def test_lineage(app: App) -> None:
    """What it was made of and what was made of it, with the roots that the key may see."""
    database = app.service.database
    source, middle, end = (
        add_checkpoint(database, "run/step-1"),
        add_checkpoint(database, "exports/step-1"),
        add_checkpoint(database, "exports/step-1", root="other"),
    )
    with database.write() as connection:
        add_lineage(connection, middle, source)
        add_lineage(connection, end, middle)
    found = app.client("read").get(f"{API}/checkpoints/{middle}/lineage").json()
    assert {node["id"]: node["distance"] for node in found["nodes"]} == {source: -1, middle: 0, end: 1}
    assert {(edge["child_id"], edge["parent_id"]) for edge in found["edges"]} == {
        (middle, source),
        (end, middle),
    }
    found = app.client("read", roots=["main"]).get(f"{API}/checkpoints/{middle}/lineage").json()
    assert {node["id"] for node in found["nodes"]} == {source, middle}
