"""Webhooks over HTTP: who may, what is shown and what never is, conditions, rotation, tests, deliveries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.app import App, running_app
from tests.support.databases import MakeDatabase
from tests.support.hook_bench import ALL_EVENTS, deliver, emit_events, rows, verify
from tests.support.receivers import Receiver

HOOKS = "/api/v1/webhooks"
URL = "https://hooks.example.com/T000/token-of-the-receiver"


@pytest.fixture
def app(make_database: MakeDatabase, tmp_path: Path) -> Iterator[App]:
    """The application on each database; loopback is allowed to receive."""
    with running_app(make_database(), tmp_path, webhook_allow_private=["127.0.0.0/8"]) as running:
        yield running


@pytest.fixture
def admin(app: App) -> TestClient:
    """With a key that may all."""
    return app.client("admin")


def make(client: TestClient, *, headers: dict[str, str] | None = None, **values: Any) -> dict[str, Any]:
    """A new webhook, as it is answered."""
    answer = client.post(HOOKS, json={"url": URL} | values, headers=headers)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"{HOOKS}/{found['id']}"
    assert answer.headers["etag"] == found["etag"] == f'"w{found["id"]}-1"'
    return found


def test_secrets_and_urls_are_shown_where_they_must_be_only(app: App, admin: TestClient) -> None:
    """The secret once, when it is made; the audit log has neither it nor the URL, which may be one itself."""
    mine = "whsec_" + "A" * 43 + "="
    made = make(admin, secret=mine)
    assert made["secret"] == mine
    once = {"Idempotency-Key": "once"}
    assert make(admin, headers=once)["secret"] != make(admin, headers=once)["secret"]
    rotated = admin.post(f"{HOOKS}/{made['id']}/rotate-secret", json={}, headers=once).json()
    assert rotated["secret"] not in (mine, None)
    assert rotated["previous_secret_until"] is not None
    for path in (HOOKS, f"{HOOKS}/{made['id']}"):
        text = admin.get(path).text
        assert mine not in text
        assert rotated["secret"] not in text
    stored = rows(app)
    assert stored["audit"].count("'webhook.") == 4
    kept = [text for table, text in stored.items() if table == "audit" or table.startswith("idempotency")]
    assert len(kept) == 2
    for text in kept:
        assert "whsec_" not in text and "token-of-the-receiver" not in text


REFUSED: list[dict[str, Any]] = [
    {"url": "http://hooks.example.com@169.254.169.254/"},
    {"url": "https://169.254.169.254/latest/meta-data"},
    {"url": "https://[::ffff:10.0.0.1]/"},
    {"url": "https://2130706433/"},
    {"url": "http://1.1.1.1/"},
    {"url": "ftp://hooks.example.com/"},
    {"url": ""},
    {"url": URL, "events": []},
    {"url": URL, "events": ["checkpoint.unknown"]},
    {"url": URL, "roots": ["nowhere"]},
    {"url": URL, "secret": "short"},
    {"url": URL, "secret": "whsec_" + "A" * 24},
    {"url": URL, "secrets": "x"},
    {"url": URL, "description": "a\u0000b"},
    {},
]


def test_what_cannot_be_meant_is_refused(admin: TestClient) -> None:
    """With 422 and a problem document, when it is made and when it is changed."""
    made = make(admin)
    one = f"{HOOKS}/{made['id']}"
    for body in REFUSED:
        answer = admin.post(HOOKS, json=body)
        assert answer.status_code == 422, body
        assert answer.headers["content-type"] == "application/problem+json"
        if body.keys() == {"url"}:
            assert admin.patch(one, json=body).status_code == 422, body
    for name in ("url", "events", "description", "is_enabled"):
        assert admin.patch(one, json={name: None}).status_code == 422
    assert admin.get(HOOKS).json()["items"] == [admin.get(one).json()]


def test_only_admins_may_and_those_of_some_roots_for_these_only(app: App, admin: TestClient) -> None:
    """A key for one root makes, sees and changes webhooks of that root alone; others get nothing."""
    for scope in ("read", "write", "convert", "delete"):
        client = app.client(scope)
        assert client.get(HOOKS).status_code == 403
        assert client.post(HOOKS, json={"url": URL}).status_code == 403
    everything, main, both = (make(admin, roots=roots) for roots in (None, ["main"], ["main", "other"]))
    limited = app.client("admin", roots=["main"])
    assert [item["id"] for item in limited.get(HOOKS).json()["items"]] == [main["id"]]
    for hidden in (everything, both):
        one = f"{HOOKS}/{hidden['id']}"
        answers = [
            limited.get(one),
            limited.patch(one, json={"is_enabled": False}),
            limited.delete(one),
            limited.post(f"{one}/rotate-secret", json={}),
            limited.post(f"{one}/test"),
            limited.get(f"{one}/deliveries"),
            limited.post(f"{one}/deliveries/1/redeliver"),
        ]
        assert [answer.status_code for answer in answers] == [404] * 7
    assert limited.post(HOOKS, json={"url": URL}).status_code == 403
    assert limited.post(HOOKS, json={"url": URL, "roots": ["other"]}).status_code == 422
    assert limited.patch(f"{HOOKS}/{main['id']}", json={"roots": None}).status_code == 403
    assert limited.post(HOOKS, json={"url": URL, "roots": ["main"]}).status_code == 201


def test_a_delivery_is_tested_listed_and_sent_again(app: App, admin: TestClient) -> None:
    """From the request to the receiver and back: state, status, attempts, by state and by page."""
    with Receiver() as receiver:
        made = make(admin, url=receiver.url, events=list(ALL_EVENTS))
        one = f"{HOOKS}/{made['id']}"
        test = admin.post(f"{one}/test")
        assert test.status_code == 202
        assert (test.json()["event"], test.json()["state"]) == ("webhook.test", "waiting")
        deliver(app)
        assert verify(
            [made["secret"]], receiver.requests[0].headers, receiver.requests[0].body, app.service.clock()
        )
        (listed,) = admin.get(f"{one}/deliveries").json()["items"]
        assert (listed["state"], listed["status_code"], listed["attempts"]) == ("delivered", 204, 1)
        assert listed["message_id"] == receiver.requests[0].headers["webhook-id"]
        again = admin.post(f"{one}/deliveries/{listed['id']}/redeliver")
        assert (again.status_code, again.json()["state"]) == (202, "waiting")
        deliver(app)
        assert len(receiver.requests) == 2
        emit_events(app, 4)
        receiver.answers = [500]
        deliver(app)
        waiting = admin.get(f"{one}/deliveries", params={"state": "waiting", "limit": 3}).json()
        assert [item["event"] for item in waiting["items"]] == ["checkpoint.committed"] * 3
        rest = admin.get(
            f"{one}/deliveries", params={"state": "waiting", "limit": 3, "cursor": waiting["next_cursor"]}
        ).json()
        assert len(rest["items"]) == 1
        assert rest["items"][0]["error"] == "answered 500: not taken"
        assert rest["next_cursor"] is None
    assert admin.post(f"{one}/deliveries/999/redeliver").status_code == 404
    admin.patch(one, json={"is_enabled": False})
    assert admin.post(f"{one}/test").status_code == 409
