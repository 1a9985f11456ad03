"""Stages: promotions, approvals, concurrent decisions, changed checkpoints, aliases and pages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi.testclient import TestClient

from dcp.errors import CheckpointError
from tests.support.app import running_app
from tests.support.catalog import API, Catalog, pages
from tests.support.catalog_rows import add_checkpoint
from tests.support.databases import MakeDatabase
from tests.support.pages import HOSTILE, Browser, PageText
from tests.support.receivers import Receiver

_RULES: Final = {
    "candidate": {"request_scope": "read"},  # the form requires write too
    "staging": {"requires_previous": True},
    "production": {
        "approvals": 2,
        "approvers": ["key:ann", "key:bob", "key:cat"],
        "requires_verified": False,
    },
}


@pytest.fixture
def catalog(make_database: MakeDatabase, tmp_path: Path) -> Iterator[Catalog]:
    """Start a catalog in which two of three approvers promote to production."""
    options: dict[str, Any] = {"rate_limit": "1000000/minute", "features": {"stages": {"rules": _RULES}}}
    with running_app(make_database(), tmp_path, **options) as app:
        yield Catalog(app, tmp_path)


def writers(catalog: Catalog, *names: str) -> list[TestClient]:
    """Return clients with new keys of these names that read and write."""
    return [catalog.app.client("read", "write", name=name) for name in names]


def ask(client: TestClient, number: int, stage: str, **more: Any) -> Any:
    """Request a promotion, and return the response."""
    return client.post(f"{API}/checkpoints/{number}/stage-requests", json={"stage": stage, **more})


def decide(client: TestClient, request: int, decision: str = "approve", **body: Any) -> int:
    """Decide a request, and return the status."""
    return client.post(f"{API}/stage-requests/{request}/{decision}", json=body).status_code


def held(catalog: Catalog, run: int = 1) -> dict[str, int]:
    """Return the checkpoints in stages."""
    return {one["stage"]: one["checkpoint_id"] for one in catalog.get(f"/runs/{run}/stages")["items"]}


@pytest.mark.each_database
def test_from_candidate_to_production_and_back(catalog: Catalog) -> None:
    """A checkpoint is in one stage at a time, and a stage has one checkpoint of a run. The stage's alias
    prevents a deletion; the history has actors and reasons."""
    first, second = catalog.add("run/step-1"), catalog.add("run/step-2")
    dev, ann, bob = writers(catalog, "dev", "ann", "bob")
    assert ask(dev, first, "staging").status_code == 409, "not from candidate"
    assert ask(dev, first, "candidate").json()["state"] == "promoted"
    assert ask(dev, first, "staging").json()["state"] == "promoted"
    assert held(catalog) == {"staging": first}
    made = ask(dev, first, "production", reason="best loss")
    request = made.json()
    assert (made.status_code, request["state"], request["approved_by"]) == (201, "requested", [])
    assert made.headers["Location"] == f"{API}/stage-requests/{request['id']}"
    assert ask(dev, first, "production").status_code == 409, "it is requested already"
    assert [decide(one, request["id"]) for one in (dev, ann, ann, bob)] == [403, 200, 409, 200]
    assert decide(bob, request["id"]) == 409, "it is closed"
    assert held(catalog) == {"production": first}
    found = catalog.get("/checkpoints", alias="production")["items"]
    assert [one["id"] for one in found] == [first] and found[0]["aliases"] == ["production"]
    assert catalog.get("/runs/1/aliases")["items"][0]["is_protected"] is True
    assert catalog.status("DELETE", f"/checkpoints/{first}") == 409
    assert ask(dev, first, "candidate").status_code == 409, "it would leave production"
    assert ask(dev, first, "production").status_code == 409, "it is there"

    other = ask(dev, second, "production").json()["id"]
    assert decide(ann, other) == decide(bob, other) == 200
    assert held(catalog) == {"production": second}
    assert catalog.status("DELETE", f"/checkpoints/{first}") == 200
    body: dict[str, Any] = {"checkpoint_id": first}
    assert catalog.status("POST", "/runs/1/stages/production/demote", ann, json=body) == 404
    body = {"checkpoint_id": second, "reason": "leaks"}
    assert catalog.status("POST", "/runs/1/stages/production/demote", dev, json=body) == 403
    assert catalog.status("POST", "/runs/1/stages/production/demote", ann, json=body) == 204
    assert held(catalog) == {} and catalog.get("/runs/1/aliases")["items"] == []
    history = pages(catalog.http, "/runs/1/stages/history", limit=3)
    shown = [(one["action"], one["stage"], one["checkpoint_id"], one["by"], one["reason"]) for one in history]
    assert shown[0] == ("demoted", "production", second, "key:ann", "leaks")
    assert [(action, stage, number) for action, stage, number, *_ in shown[::-1]] == [
        ("requested", "candidate", first),
        ("promoted", "candidate", first),
        ("requested", "staging", first),
        ("moved", "candidate", first),
        ("promoted", "staging", first),
        ("requested", "production", first),
        ("approved", "production", first),
        ("approved", "production", first),
        ("moved", "staging", first),
        ("promoted", "production", first),
        ("requested", "production", second),
        ("approved", "production", second),
        ("approved", "production", second),
        ("replaced", "production", first),
        ("promoted", "production", second),
        ("demoted", "production", second),
    ]
    admin = catalog.app.client("admin", roots=["main"])  # an admin of this root
    actions = {one["action"] for one in pages(admin, "/audit")}
    assert actions >= {"stage_request.create", "stage_request.approve", "stage.demote", "alias.set"}


def test_rules_name_requesters_and_approvers(catalog: Catalog) -> None:
    """Rules name who may request and approve; the requester and admins withdraw, approvers reject with a
    reason; keys for other roots get 404."""
    number = catalog.add("run/step-1")
    dev, eve, ann = writers(catalog, "dev", "eve", "ann")
    stranger = catalog.app.client("admin", roots=["other"])
    reader = catalog.app.client("read", name="reader")
    assert ask(reader, number, "candidate").status_code == 403
    assert [ask(dev, number, stage).status_code for stage in ("nowhere", "production")] == [404, 201]
    assert [decide(one, 1) for one in (catalog.http, stranger, reader)] == [403, 404, 403]
    assert [decide(one, 1, "reject", reason="no") for one in (dev, stranger)] == [403, 404]
    assert decide(ann, 1, "reject") == 422 and decide(ann, 1, "reject", reason="overfits") == 200
    assert [decide(ask(dev, number, "production") and one, 2, "withdraw") for one in (eve, dev)] == [403, 200]
    assert ask(dev, number, "production").status_code == 201 and decide(catalog.http, 3, "withdraw") == 200
    states = [(one["id"], one["state"]) for one in pages(catalog.http, "/stage-requests", limit=1)]
    assert states == [(3, "withdrawn"), (2, "withdrawn"), (1, "rejected")]
    assert (
        pages(stranger, "/stage-requests") == [] and stranger.get(f"{API}/runs/1/stages").status_code == 404
    )
    stages = {one["name"]: one for one in catalog.get("/stages", dev)["items"]}
    rights = {name: (one["may_request"], one["may_approve"]) for name, one in stages.items()}
    assert rights == {"candidate": (True, False), "staging": (True, False), "production": (True, False)}
    again = [ask(dev, number, "production").json()]
    tag = {"If-Match": f'"s{again[0]["id"]}-7"'}
    stale = ann.post(f"{API}/stage-requests/{again[0]['id']}/approve", json={}, headers=tag)
    assert stale.status_code == 412


@pytest.mark.each_database
def test_concurrent_decisions(catalog: Catalog) -> None:
    """Of three concurrent approvals two promote, once; two promotions to one stage follow each other; of an
    approval and a deletion only one succeeds."""
    approvers = writers(catalog, "ann", "bob", "cat")
    for round in range(4):
        numbers = [catalog.add(f"run-{round}/step-{step}") for step in range(2)]
        run = catalog.get(f"/checkpoints/{numbers[0]}")["run_id"]
        requests = [ask(catalog.http, number, "production").json()["id"] for number in numbers]
        with ThreadPoolExecutor(6) as pool:
            decisions = [pool.submit(decide, one, number) for number in requests for one in approvers]
            found = [one.result() for one in decisions]
        assert sorted(found[:3]) == sorted(found[3:]) == [200, 200, 409]
        history = pages(catalog.http, f"/runs/{run}/stages/history")
        promoted = [one["checkpoint_id"] for one in history if one["action"] == "promoted"]
        assert sorted(promoted) == numbers and held(catalog, run) == {"production": promoted[0]}
        assert [one["action"] for one in history].count("replaced") == 1
        other = catalog.add(f"run-{round}/step-9")
        request = ask(catalog.http, other, "production").json()["id"]
        assert decide(approvers[0], request) == 200
        with ThreadPoolExecutor(2) as pool:
            approved = pool.submit(decide, approvers[1], request)
            deleted = pool.submit(catalog.status, "DELETE", f"/checkpoints/{other}")
            assert sorted([approved.result(), deleted.result()]) == [200, 409]
        is_deleted = deleted.result() == 200
        assert held(catalog, run) == {"production": promoted[0] if is_deleted else other}


def test_a_changed_checkpoint_is_not_promoted(catalog: Catalog) -> None:
    """An approval is refused after a new save of the checkpoint, and a new request closes the old one. A
    change after the promotion is shown. New metrics are no change."""
    number = catalog.add("run/step-1", save_id="0000aaaa")
    ann, bob = writers(catalog, "ann", "bob")
    request = ask(ann, number, "production").json()["id"]
    assert decide(ann, request) == 403, "it is their own"
    catalog.add("run/step-1", save_id="0000bbbb", tensors=4)
    assert catalog.get(f"/stage-requests/{request}")["is_changed"] is True
    assert decide(bob, request) == 409
    again = ask(ann, number, "production").json()["id"]
    assert catalog.get(f"/stage-requests/{request}")["state"] == "outdated"
    assert catalog.status("PATCH", f"/checkpoints/{number}/metrics", json={"metrics": {"loss": 0.1}}) == 200
    (cat,) = writers(catalog, "cat")
    assert [decide(one, again) for one in (bob, cat)] == [200, 200]
    assert catalog.get("/runs/1/stages")["items"][0]["is_changed"] is False
    catalog.add("run/step-1", save_id="0000cccc")
    holder = catalog.get("/runs/1/stages")["items"][0]
    assert (holder["is_changed"], holder["state"], holder["verification"]) == (
        True,
        "committed",
        "unverified",
    )
    browser = Browser(catalog.app.client())
    browser.sign_in(catalog.app.key("read", name="looker"))
    assert "has changed since it was promoted" in browser.page(f"/checkpoints/{number}").text


def test_prunes_old_requests_and_root_admins(catalog: Catalog) -> None:
    """A checkpoint being pruned is not promoted; requests expire after 30 days; a repeated demotion takes
    effect once; the audit log is visible to admins of the root."""
    number, other = catalog.add("run/step-1"), catalog.add("run/step-2")
    dev, ann, bob = writers(catalog, "dev", "ann", "bob")
    request = ask(dev, other, "production").json()["id"]
    assert decide(ann, request) == 200
    params = {"kind": "prune", "params": {"checkpoint_id": number, "parts": ["optimizer"]}}
    job = catalog.http.post(f"{API}/jobs", json=params).json()["id"]
    refused = ask(dev, number, "candidate")
    assert refused.status_code == 409 and "drops parts" in refused.json()["detail"]
    assert catalog.status("POST", f"/jobs/{job}/cancel") < 300
    catalog.app.work(time.time(), "stage-requests")
    with catalog.app.service.database.write() as connection:
        connection.exec_driver_sql("UPDATE stage_requests SET created_seconds = created_seconds - 2600000")
    assert decide(bob, request) == 409, "it expired, and is to be closed"
    catalog.app.work(time.time() + 1000, "stage-requests")
    assert catalog.get(f"/stage-requests/{request}")["state"] == "expired"
    assert catalog.get("/runs/1/stages/history")["items"][0]["action"] == "expired"
    assert ask(dev, other, "candidate").status_code == 201
    gone: Any = {"json": {"checkpoint_id": other}, "headers": {"Idempotency-Key": "once"}}
    assert [dev.post(f"{API}/runs/1/stages/candidate/demote", **gone).status_code for _ in "ab"] == [204, 204]
    seen = {
        root: {one["action"] for one in pages(catalog.app.client("admin", roots=[root]), "/audit")}
        for root in ("main", "other")
    }
    assert seen["main"] >= {"stage_request.create", "stage_request.approve", "stage_request.expire"}
    assert not seen["other"] & seen["main"]


def test_production_by_default(tmp_path: Path) -> None:
    """By default production needs a verified checkpoint and the approval of another admin. Webhooks get the
    events, and the alias of a stage cannot be set or removed directly."""
    stages = {"reserved": True, "rules": {"production": {"request_scope": "write"}}}
    more: dict[str, Any] = {"features": {"stages": stages}, "webhook_allow_private": ("127.0.0.1",)}
    url = f"sqlite:///{tmp_path / 'own.sqlite'}"
    with running_app(url, tmp_path, **more) as app, Receiver() as receiver:
        own = Catalog(app, tmp_path)
        kinds = ["stage.requested", "stage.promoted", "stage.rejected", "stage.demoted"]
        assert own.status("POST", "/webhooks", json={"url": receiver.url, "events": kinds}) == 201
        number = add_checkpoint(app.service.database, "run/step-1")
        (dev,) = writers(own, "dev")
        refused = ask(dev, number, "production")
        assert refused.status_code == 409 and "verify it" in refused.json()["detail"]
        with app.service.database.write() as connection:
            connection.exec_driver_sql("UPDATE checkpoints SET verification = 'good'")
        request = ask(dev, number, "production", reason="ready").json()["id"]
        aliases = "/runs/1/aliases"
        body: Any = {"json": {"checkpoint_id": number}}
        assert own.status("PUT", f"{aliases}/production", **body) == 409, "it is reserved"
        assert own.status("PUT", f"{aliases}/best", **body) == 200
        assert [decide(one, request) for one in (dev, own.http)] == [403, 200]
        anyhow: Any = {"headers": {"If-Match": "*"}}
        assert own.status("PUT", f"{aliases}/production", **body, **anyhow) == 409
        assert own.status("DELETE", f"{aliases}/production", **anyhow) == 409
        for name in ("events:webhooks", "webhooks"):
            app.work(time.time(), name)
        sent = [json.loads(one.body) for one in receiver.requests]
    assert [one["type"] for one in sent] == ["stage.requested", "stage.promoted"]
    assert sent[1]["data"]["checkpoint"]["id"] == number
    detail = sent[1]["data"]["detail"]
    assert (detail["stage"], detail["by"], detail["reason"]) == ("production", "key:boss", "ready")


@pytest.mark.each_database
def test_approvers_by_account_and_group(make_database: MakeDatabase, tmp_path: Path) -> None:
    """Two keys of an account approve once; members of a group approve if they have a role in the root."""
    approvers = ["service-account:ada", "group:leads"]
    rule = {"approvals": 2, "approvers": approvers, "requires_verified": False}
    options: dict[str, Any] = {"features": {"stages": {"rules": {"production": rule}}}}
    with running_app(make_database(), tmp_path, **options) as app:
        own, clients = Catalog(app, tmp_path), {}
        number = own.add("run/step-1")
        for name, root in (("ada", "main"), ("bob", "main"), ("eve", "main"), ("cat", "other")):
            account = own.http.post(f"{API}/accounts", json={"name": name}).json()["id"]
            role = {"account_id": account, "role": "contributor", "root": root}
            assert own.status("POST", "/grants", json=role) == 201
            for key in (name, f"{name}-2"):
                body = {"name": key, "account_id": account, "scopes": ["read", "write"]}
                secret = own.http.post(f"{API}/keys", json=body).json()["key"]
                clients[key] = app.client()
                clients[key].headers["authorization"] = f"Bearer {secret}"
        with app.service.database.write() as connection:
            leads = "UPDATE accounts SET groups = '[\"leads\"]' WHERE name IN ('bob', 'cat')"
            connection.exec_driver_sql(leads)
        request = ask(clients["eve"], number, "production").json()["id"]
        found = {name: decide(client, request) for name, client in clients.items()}
        assert found == {
            "ada": 200,
            "ada-2": 409,
            "bob": 200,
            "bob-2": 409,
            "eve": 409,
            "eve-2": 409,
            "cat": 404,
            "cat-2": 404,
        }
        assert held(own) == {"production": number}


def test_approvals_of_revoked_keys_do_not_count(catalog: Catalog) -> None:
    """An approval by a key that was revoked later does not count."""
    number = catalog.add("run/step-1")
    dev, ann, bob, cat = writers(catalog, "dev", "ann", "bob", "cat")
    assert ask(dev, number, "production").status_code == 201 and decide(ann, 1) == 200
    assert catalog.status("DELETE", f"/keys/{catalog.get('/whoami', ann)['key_id']}") == 200
    assert decide(bob, 1) == 200
    found = catalog.get("/stage-requests/1")
    assert (found["state"], found["approved_by"], held(catalog)) == ("requested", ["key:bob"], {})
    assert decide(cat, 1) == 200 and held(catalog) == {"production": number}


@pytest.mark.each_database
def test_keys_count_for_the_account_that_made_them(make_database: MakeDatabase, tmp_path: Path) -> None:
    """A key without an account counts for the account that created it: neither approves requests of the
    other. The key loses rights with the account."""
    rule = {"approvals": 1, "requires_verified": False}
    options: dict[str, Any] = {"features": {"stages": {"rules": {"production": rule}}}}
    with running_app(make_database(), tmp_path, **options) as app:
        own = Catalog(app, tmp_path)
        number = own.add("run/step-1")
        account = own.http.post(f"{API}/accounts", json={"name": "lead"}).json()["id"]
        grant = own.http.post(f"{API}/grants", json={"account_id": account, "role": "admin"}).json()["id"]

        def key(by: TestClient, name: str, **more: Any) -> TestClient:
            body = {"name": name, "scopes": ["admin"], **more}
            client = app.client()
            client.headers["authorization"] = f"Bearer {by.post(f'{API}/keys', json=body).json()['key']}"
            return client

        lead = key(own.http, "lead", account_id=account)
        one, other = key(lead, "one"), key(lead, "other", roots=["main"])
        inner = key(one, "inner")
        makers = {each["name"]: each["maker"] for each in own.get("/keys")["items"]}
        assert {makers[name] for name in ("one", "other", "inner")} == {f"account#{account}"}
        for asking, refused in ((lead, (one, inner)), (one, (lead, other, inner))):
            request = ask(asking, number, "production").json()["id"]
            assert [decide(each, request) for each in refused] == [403] * len(refused)
            assert decide(asking, request, "withdraw") == 200
        request = ask(inner, number, "production").json()["id"]
        assert decide(lead, request) == 403 and decide(own.http, request) == 200
        role = {"account_id": account, "role": "admin", "root": "main"}
        assert own.status("POST", "/grants", json=role) == 201
        assert own.status("DELETE", f"/grants/{grant}") == 204
        assert [own.get("/whoami", each)["roots"] for each in (one, other, inner)] == [["main"]] * 3
        assert own.status("PATCH", f"/accounts/{account}", json={"is_disabled": True}) == 200
        assert [own.status("GET", "/whoami", each) for each in (one, other, inner)] == [401] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"rules": {"prod": {}}},
        {"order": ["a", "a"]},
        {"rules": {"production": {"approvals": 2, "approvers": ["a"]}}},
        {"rules": {"staging": {"approvals": 1, "approvers": ["a"], "requesters": ["a"]}}},
    ],
)
def test_invalid_settings_stop_the_start(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Invalid settings stop the start, with the name of the feature."""
    url = f"sqlite:///{tmp_path / 'c.sqlite'}"
    with (
        pytest.raises(CheckpointError, match=r"features\.stages"),
        running_app(url, tmp_path, features={"stages": wrong}),
    ):
        pass


def test_stages_on_pages(catalog: Catalog, tmp_path: Path) -> None:
    """Forms without scripts request, reject, approve and demote; without keys one caller is enough."""
    number = catalog.add("run/step-1")
    dev, ann = Browser(catalog.app.client()), Browser(catalog.app.client())
    dev.sign_in(catalog.app.key("read", "write", name="dev"))
    ann.sign_in(catalog.app.key("read", "write", name="ann"))
    place = f"/checkpoints/{number}"
    for reason in HOSTILE[:2]:
        form = dev.page(place).form(f"{place}/stage-requests")
        sent = dev.submit(form, stage="production", reason=reason)
        assert "Promotion requested." in PageText(sent.text).text
        page = ann.page("/stage-requests")
        assert reason in page.text and reason in ann.page("/runs/1/stages").text
        (path,) = {one.action for one in page.forms if one.action.endswith("/reject")}
        assert ann.submit(page.form(path), reason="").status_code == 422
        assert "Request rejected." in ann.submit(page.form(path), reason=reason).text
    dev.submit(dev.page(place).form(f"{place}/stage-requests"), stage="production")
    (path,) = {one.action for one in ann.page(place).forms if one.action.endswith("/approve")}
    assert "More approvals are needed." in ann.submit(ann.page(place).form(path)).text
    assert not any(one.action.endswith("/approve") for one in ann.page(place).forms)
    assert ann.client.post("/stage-requests/1/approve").status_code == 403, "without the token of a form"
    bob = Browser(catalog.app.client())
    bob.sign_in(catalog.app.key("read", "write", name="bob"))
    assert "Promoted." in PageText(bob.submit(bob.page("/runs/1").form(path)).text).text
    demote = "/runs/1/stages/production/demote"
    page = bob.page(place)
    assert "Remove the alias" not in str([given for _, given in page.elements])
    assert "Demoted." in bob.submit(page.form(demote), reason="old").text
    eve = Browser(catalog.app.client())
    eve.sign_in(catalog.app.key("read", roots=["other"], name="eve"))
    assert eve.get("/runs/1/stages").status_code == 404 and "run/" not in eve.page("/stage-requests").text
    with running_app(f"sqlite:///{tmp_path / 'own.sqlite'}", tmp_path, auth="off") as app:
        number = add_checkpoint(app.service.database, "run/step-1")
        with app.service.database.write() as connection:
            connection.exec_driver_sql("UPDATE checkpoints SET verification = 'good'")
        alone = Browser(app.client())
        form = alone.page(f"/checkpoints/{number}").form(f"/checkpoints/{number}/stage-requests")
        assert "Promoted." in alone.submit(form, stage="production").text
