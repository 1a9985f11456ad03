"""``/rules`` and ``/retention``: made, read, changed with If-Match, removed; who may, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp.server.catalog.roots import set_scanned
from dcp.server.routes.administration import retention
from tests.support.app import App, running_app
from tests.support.catalog_rows import add_checkpoint
from tests.support.databases import MakeDatabase

RULES = "/api/v1/rules"
RETENTION = "/api/v1/retention/policies"
PREVIEW = "/api/v1/retention/preview"

_RULE: dict[str, Any] = {
    "name": "export",
    "condition": {"root": "main", "run": "llama/*", "tag": "release", "every_steps": 1000},
    "actions": [
        {"kind": "verify"},
        {
            "kind": "convert",
            "to": "safetensors",
            "target_root": "other",
            "target_key": "{run}/{name}.safetensors",
            "dtype": "bfloat16",
            "only": ["model.*"],
        },
    ],
}
_POLICY: dict[str, Any] = {
    "name": "tidy",
    "root": "main",
    "run_glob": "run*",
    "keep": {"last": 2, "best": [{"metric": "loss", "mode": "min"}]},
}


@pytest.fixture
def app(make_database: MakeDatabase, tmp_path: Path) -> Iterator[App]:
    """The application with the roots "main" and "other"."""
    with running_app(make_database(), tmp_path) as running:
        yield running


def test_a_rule_from_making_to_removing(app: App) -> None:
    """As it was given it is shown; it is changed by whoever has seen it last."""
    admin = app.client("admin")
    made = admin.post(RULES, json=_RULE)
    assert made.status_code == 201, made.text
    rule = made.json()
    assert {name: rule[name] for name in ("condition", "actions")} == {
        name: _RULE[name] for name in ("condition", "actions")
    }
    place = made.headers["Location"]
    assert admin.get(place).json() == rule and admin.get(place).headers["ETag"] == made.headers["ETag"]
    assert admin.get(RULES).json() == {"items": [rule], "next_cursor": None}
    assert admin.post(RULES, json=_RULE).status_code == 409
    changed = admin.patch(place, json={"is_enabled": False}, headers={"If-Match": made.headers["ETag"]})
    assert changed.status_code == 200 and changed.json()["is_enabled"] is False
    assert changed.json()["actions"] == rule["actions"]
    stale = {"If-Match": made.headers["ETag"]}
    assert admin.patch(place, json={"name": "x"}, headers=stale).status_code == 412
    assert admin.delete(place, headers=stale).status_code == 412
    assert admin.delete(place).status_code == 204
    assert admin.get(place).status_code == 404


_WRONG_RULES: list[dict[str, Any]] = [
    {"actions": []},
    {"actions": [{"kind": "purge"}]},
    {"actions": [{"kind": "verify", "checkpoint_id": 1}]},
    {"actions": [_RULE["actions"][1] | {"target_key": "{secret}.safetensors"}]},
    {"actions": [_RULE["actions"][1] | {"target_root": "nowhere"}]},
    {"condition": {"root": "nowhere"}},
    {"condition": {"run": "*" * 300}},
    {"condition": {"every_steps": 0}},
    {"condition": {"every_steps": "5"}},
    {"event": "checkpoint.deleted"},
    {"name": ""},
]


def test_rules_that_cannot_be_meant(app: App) -> None:
    """They are refused, and nothing is stored."""
    admin = app.client("admin")
    for change in _WRONG_RULES:
        assert admin.post(RULES, json=_RULE | change).status_code == 422, change
    assert admin.get(RULES).json()["items"] == []


def test_who_may(app: App) -> None:
    """Rules are for admins of all roots; policies for those who may delete, of the roots that they see."""
    for client in (app.client("read", "write", "convert", "delete"), app.client("admin", roots=["main"])):
        assert client.get(RULES).status_code == 403
        assert client.post(RULES, json=_RULE).status_code == 403
    place = app.client("delete").post(RETENTION, json=_POLICY).headers["Location"]
    stranger = app.client("read", "delete", roots=["other"])
    assert stranger.get(RETENTION).json()["items"] == []
    for answer in (
        stranger.get(place),
        stranger.get(f"{place}/preview"),
        stranger.patch(place, json={"is_enabled": False}),
        stranger.delete(place),
        stranger.post(f"{place}/run"),
        stranger.post(RETENTION, json=_POLICY),
        stranger.post(PREVIEW, json={"root": "main", "keep": {"last": 1}}),
    ):
        assert answer.status_code == 404, answer.text
    reader = app.client("read")
    assert reader.get(place).status_code == 200
    assert reader.post(RETENTION, json=_POLICY).status_code == 403
    assert reader.post(f"{place}/run").status_code == 403


def test_a_policy_from_making_to_removing(app: App) -> None:
    """The grace is that of the service unless it is given; a run of it is a job."""
    client = app.client("delete", "read")
    made = client.post(RETENTION, json=_POLICY)
    assert made.status_code == 201, made.text
    policy = made.json()
    assert policy["grace_seconds"] == app.service.settings.delete_grace_seconds
    assert policy["keep"] == {"last": 2, "best": [{"metric": "loss", "count": 1, "mode": "min"}]}
    place = made.headers["Location"]
    assert client.get(place).json() == policy
    changed = client.patch(
        place, json={"keep": {"last": 5}, "grace_seconds": 1.5}, headers={"If-Match": made.headers["ETag"]}
    )
    assert changed.json()["keep"] == {"last": 5} and changed.json()["grace_seconds"] == 1.5
    assert client.patch(place, json={}, headers={"If-Match": made.headers["ETag"]}).status_code == 412
    job = client.post(f"{place}/run")
    assert job.status_code == 202 and job.json()["kind"] == "retention"
    assert client.get(job.headers["Location"]).json()["id"] == job.json()["id"]
    assert client.post(f"{place}/run").json()["id"] == job.json()["id"]
    assert client.delete(place).status_code == 204
    assert client.get(place).status_code == 404


def test_previews_change_nothing(app: App) -> None:
    """What goes, what stays and why, run by run, in pages; of a policy, or of one that is tried out."""
    for run in ("run-a", "run-b", "else"):
        for step in range(4):
            add_checkpoint(app.service.database, f"{run}/step-{step}", metrics={"loss": float(step)})
    client = app.client("delete", "read")
    place = client.post(RETENTION, json=_POLICY).headers["Location"]
    first = client.get(f"{place}/preview", params={"limit": 1}).json()
    second = client.get(f"{place}/preview", params={"limit": 1, "cursor": first["next_cursor"]}).json()
    assert [page["items"][0]["run"] for page in (first, second)] == ["run-a", "run-b"]
    assert second["next_cursor"] is None
    found = first["items"][0]
    assert (found["kept"], found["deleted"], found["deleted_bytes"]) == (3, 1, 53)
    reasons = {one["step"]: one["reasons"] for one in found["checkpoints"]}
    assert reasons == {
        0: ["best loss (min)"],
        1: [],
        2: ["last 2"],
        3: ["newest", "last 2"],
    }
    tried = client.post(PREVIEW, json={"root": "main", "keep": {"every_steps": 2}}).json()
    assert [(item["run"], item["deleted"]) for item in tried["items"]] == [
        ("else", 1),
        ("run-a", 1),
        ("run-b", 1),
    ]
    states = client.get("/api/v1/checkpoints").json()["items"]
    assert {one["state"] for one in states} == {"committed"}


def test_previews_end_a_page_behind_many_checkpoints(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many runs were asked for: the next page goes on, and each run comes once."""
    monkeypatch.setattr(retention, "_MAX_PLANNED", 5)
    for run in ("a", "b", "c"):
        for step in range(3):
            add_checkpoint(app.service.database, f"{run}/step-{step}")
    client, body = app.client("read"), {"root": "main", "keep": {"last": 1}}
    first = client.post(PREVIEW, json=body).json()
    rest = client.post(PREVIEW, json=body, params={"cursor": first["next_cursor"]}).json()
    assert [[item["run"] for item in page["items"]] for page in (first, rest)] == [["a", "b"], ["c"]]
    assert rest["next_cursor"] is None


def test_a_series_of_a_run(app: App) -> None:
    """A metric in so many points; a run that may not be seen is not there, a misspelt metric is an error."""
    for step in range(10):
        add_checkpoint(app.service.database, f"run/step-{step}", metrics={"loss": float(step)})
    client = app.client("read")
    (run,) = client.get("/api/v1/runs").json()["items"]
    url = f"/api/v1/runs/{run['id']}/series"
    found = client.get(url, params={"metric": "loss", "points": 2}).json()
    assert (found["count"], [point["mean"] for point in found["points"]]) == (10, [2.0, 7.0])
    assert found["points"][0]["last_at"].endswith("Z")
    assert app.client("read", roots=["other"]).get(url, params={"metric": "loss"}).status_code == 404
    with app.service.database.write() as connection:  # until then a metric may yet come
        for root in ("main", "other"):
            set_scanned(connection, root, state={}, now=1.0)
    unknown = client.get(url, params={"metric": "los"})
    assert unknown.status_code == 422
    assert "'loss'" in unknown.json()["detail"]
    assert client.get(url).status_code == 422


_WRONG_POLICIES: list[dict[str, Any]] = [
    {"keep": {}},
    {"keep": {"last": 0}},
    {"keep": {"last": "2"}},
    {"keep": {"best": [{"metric": "loss", "mode": "middle"}]}},
    {"keep": {"last": 1, "forever": True}},
    {"run_glob": ""},
    {"run_glob": "[b-a]"},
    {"interval_seconds": 1},
    {"grace_seconds": -1},
    {"root": "NOT A ROOT"},
]


def test_policies_that_cannot_be_meant(app: App) -> None:
    """They are refused, whether they are made or tried out."""
    client = app.client("delete", "read")
    for change in _WRONG_POLICIES:
        assert client.post(RETENTION, json=_POLICY | change).status_code == 422, change
        if not {"interval_seconds", "grace_seconds"} & set(change):
            tried = {name: value for name, value in (_POLICY | change).items() if name != "name"}
            assert client.post(PREVIEW, json=tried).status_code == 422, change
    assert client.get(RETENTION).json()["items"] == []
