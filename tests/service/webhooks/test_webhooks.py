"""Webhooks over HTTP: access, secrets never shown again, sealing, rotation and deliveries."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.app import App, running_app
from tests.support.databases import MakeDatabase
from tests.support.hook_bench import ALL_EVENTS, deliver, emit_events, rows, stored_secrets, verify
from tests.support.receivers import Receiver

HOOKS = "/api/v1/webhooks"
URL = "https://hooks.example.com/T000/token-of-the-receiver"
FIRST, SECOND = ("whsec_" + letter * 43 + "=" for letter in "AB")
KEY, OTHER = "first key of the operator, long enough", "second key of the operator, long enough"


def app_with(url: str, folder: Path, **settings: Any) -> Any:
    """Start the application with loopback as an allowed receiver."""
    return running_app(url, folder, webhook_allow_private=["127.0.0.0/8"], **settings)


@pytest.fixture
def app(make_database: MakeDatabase, tmp_path: Path) -> Iterator[App]:
    """Start the application on each database."""
    with app_with(make_database(), tmp_path) as running:
        yield running


@pytest.fixture
def admin(app: App) -> TestClient:
    """Return a client with a key of an admin."""
    return app.client("admin")


def make(client: TestClient, **values: Any) -> dict[str, Any]:
    """Create a webhook, and return it."""
    answer = client.post(HOOKS, json={"url": URL} | values)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_admins_of_roots_manage_their_webhooks_only(app: App, admin: TestClient) -> None:
    """Admins of some roots create, see and change webhooks of these roots only."""
    everything, main, both = (make(admin, roots=roots) for roots in (None, ["main"], ["main", "other"]))
    limited = app.client("admin", roots=["main"])
    assert [item["id"] for item in limited.get(HOOKS).json()["items"]] == [main["id"]]
    for hidden in (everything, both):
        one = f"{HOOKS}/{hidden['id']}"
        answers = [limited.get(one), limited.patch(one, json={"is_enabled": False}), limited.delete(one)]
        answers += [limited.post(f"{one}/{path}", json={}) for path in ("rotate-secret", "test")]
        answers += [limited.get(f"{one}/deliveries"), limited.post(f"{one}/deliveries/1/redeliver")]
        assert {answer.status_code for answer in answers} == {404}
    assert limited.post(HOOKS, json={"url": URL}).status_code == 403
    assert limited.post(HOOKS, json={"url": URL, "roots": ["other"]}).status_code == 422
    assert limited.patch(f"{HOOKS}/{main['id']}", json={"roots": None}).status_code == 403
    assert limited.post(HOOKS, json={"url": URL, "roots": ["main"]}).status_code == 201


def test_a_delivery_is_tested_listed_and_sent_again(app: App, admin: TestClient) -> None:
    """A test delivery is sent, listed with state and attempts, filtered, and sent again."""
    with Receiver() as receiver:
        made = make(admin, url=receiver.url, events=list(ALL_EVENTS))
        one = f"{HOOKS}/{made['id']}"
        test = admin.post(f"{one}/test")
        assert (test.status_code, test.json()["event"]) == (202, "webhook.test")
        deliver(app)
        (request,) = receiver.requests
        assert verify([made["secret"]], request.headers, request.body, app.service.clock())
        (listed,) = admin.get(f"{one}/deliveries").json()["items"]
        assert (listed["state"], listed["status_code"], listed["attempts"]) == ("delivered", 204, 1)
        assert listed["message_id"] == request.headers["webhook-id"]
        again = admin.post(f"{one}/deliveries/{listed['id']}/redeliver")
        assert (again.status_code, again.json()["state"]) == (202, "waiting")
        deliver(app)
        assert len(receiver.requests) == 2
        emit_events(app, 4)
        receiver.answers = [500]
        deliver(app)
        query: dict[str, Any] = {"state": "waiting", "limit": 3}
        waiting = admin.get(f"{one}/deliveries", params=query).json()
        assert [item["event"] for item in waiting["items"]] == ["checkpoint.committed"] * 3
        rest = admin.get(f"{one}/deliveries", params=query | {"cursor": waiting["next_cursor"]}).json()
        assert [item["error"] for item in rest["items"]] == ["status 500: expected 2xx"]
    admin.patch(one, json={"is_enabled": False})
    assert admin.post(f"{one}/test").status_code == 409


# -- secrets -------------------------------------------------------------------------------------------------


def test_secrets_are_shown_once(app: App, admin: TestClient, capfd: pytest.CaptureFixture[str]) -> None:
    """A secret is shown once, and is in no other response, log, stored response or delivery."""
    refused = f"{FIRST}*"
    with Receiver(answers=[500]) as receiver:
        body, once = {"url": receiver.url, "secret": FIRST}, {"Idempotency-Key": "once"}
        made = admin.post(HOOKS, json=body, headers=once)
        one = f"{HOOKS}/{made.json()['id']}"
        rotated = admin.post(f"{one}/rotate-secret", json={"secret": SECOND}, headers=once)
        assert (made.json()["secret"], rotated.json()["secret"]) == (FIRST, SECOND)
        stale = {"If-Match": '"w1-99"'}
        answers = [admin.post(f"{one}/test"), admin.post(HOOKS, json={**body, "secret": refused})]
        answers += [admin.post(HOOKS, json={**body, "nonsense": FIRST})]
        answers += [admin.post(f"{one}/rotate-secret", json={"secret": SECOND}, headers=stale)]
        deliver(app)
    paths = [HOOKS, one, f"{one}/deliveries", "/api/v1/audit", "/metrics", "/readyz", "/openapi.json"]
    answers += [admin.get(path) for path in paths]
    answers += [admin.patch(one, json={"description": "other"}), admin.delete(one, headers=stale)]
    (request,), stored = receiver.requests, rows(app)
    assert FIRST in stored.pop("webhooks")
    sent = json.dumps(dict(request.headers)) + request.body.decode()
    texts = [*(answer.text for answer in answers), *stored.values(), *capfd.readouterr(), sent]
    for secret in (FIRST, SECOND, refused):
        assert not [text for text in texts if secret.removeprefix("whsec_") in text]
    assert "webhook.rotate" in stored["audit"]
    kept = [text for table, text in stored.items() if table == "audit" or table.startswith("idempotency")]
    assert len(kept) == 2 and not [text for text in kept if receiver.url in text]


def signed_with(app: App, receiver: Receiver, webhook: int, secrets: list[str]) -> bool:
    """Send a test delivery, and return True if each of these secrets signed the request."""
    assert app.base.post(f"{HOOKS}/{webhook}/test").status_code == 202
    deliver(app)
    request = receiver.requests.pop()
    return all(verify([one], request.headers, request.body, time.time()) for one in secrets)


def test_with_a_key_the_database_has_no_secret(make_database: MakeDatabase, tmp_path: Path) -> None:
    """With webhook_key all secrets are sealed in the database, and sign, also the rotated one."""
    with Receiver() as receiver, app_with(make_database(), tmp_path, webhook_key=KEY, auth="off") as app:
        admin = app.base
        first, second = make(admin, url=receiver.url, secret=FIRST), make(admin, url=receiver.url)
        rotated = admin.post(f"{HOOKS}/{second['id']}/rotate-secret", json={}).json()
        texts = stored_secrets(app)
        assert len(texts) == 3 and all(text.startswith("sealed1:") for text in texts)
        for secret in (FIRST, second["secret"], rotated["secret"]):
            assert secret.removeprefix("whsec_") not in json.dumps(texts)
        assert signed_with(app, receiver, first["id"], [FIRST])
        assert signed_with(app, receiver, second["id"], [second["secret"], rotated["secret"]])


def test_a_new_webhook_key_seals_existing_secrets(make_database: MakeDatabase, tmp_path: Path) -> None:
    """The clean-up seals existing secrets, and seals them again with a new key; clients see no change."""
    url = make_database()
    with Receiver() as receiver:
        with app_with(url, tmp_path, auth="off") as app:
            made = make(app.base, url=receiver.url, secret=FIRST)
            one = f"{HOOKS}/{made['id']}"
            app.base.post(f"{one}/rotate-secret", json={"secret": FIRST})
            app.work(time.time(), "webhooks-clean-up")
            assert stored_secrets(app) == [FIRST] * 2
            before = app.base.get(one).json()
        for keys in ({"webhook_key": KEY}, {"webhook_key": OTHER, "webhook_key_before": KEY}):
            with app_with(url, tmp_path, auth="off", **keys) as app:
                sealed = stored_secrets(app)
                assert signed_with(app, receiver, made["id"], [FIRST])
                app.work(time.time(), "webhooks-clean-up")
                anew = stored_secrets(app)
                assert not set(sealed) & set(anew) and all(text.startswith("sealed1:") for text in anew)
                app.work(time.time(), "webhooks-clean-up")
                assert stored_secrets(app) == anew
                assert app.base.get(one).json() == before
        with app_with(url, tmp_path, webhook_key=OTHER, auth="off") as app:
            assert signed_with(app, receiver, made["id"], [FIRST])


def test_with_a_lost_key_nothing_is_sent(make_database: MakeDatabase, tmp_path: Path) -> None:
    """With a lost key nothing is sent unsigned; the delivery says why, and a new secret repairs it."""
    url = make_database()
    with Receiver() as receiver:
        with app_with(url, tmp_path, webhook_key=KEY, auth="off") as app:
            made = make(app.base, url=receiver.url)
        one = f"{HOOKS}/{made['id']}"
        with app_with(url, tmp_path, webhook_key=OTHER, auth="off") as app:
            admin, sealed = app.base, stored_secrets(app)
            app.work(time.time(), "webhooks-clean-up")
            assert stored_secrets(app) == sealed  # the key may be found again
            admin.post(f"{one}/test")
            assert deliver(app) == 1 and receiver.requests == []
            (delivery,) = admin.get(f"{one}/deliveries").json()["items"]
            assert delivery["state"] == "waiting" and "webhook_key" in delivery["error"]
            anew = admin.post(f"{one}/rotate-secret", json={"overlap_seconds": 0}).json()
            deliver(app, 100)
            request = receiver.requests.pop()
            assert verify([anew["secret"]], request.headers, request.body, time.time() + 100)
