"""Secrets of webhooks sealed with the operator's key: in the database nothing that signs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.support.app import App, running_app
from tests.support.databases import MakeDatabase
from tests.support.hook_bench import clean, deliver, verify
from tests.support.hook_bench import stored_secrets as stored
from tests.support.receivers import Receiver

HOOKS = "/api/v1/webhooks"
SEALED_PREFIX = "sealed1:"
GIVEN = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo0NTY3ODk="
KEY, OTHER = "first key of the operator, long enough", "second key of the operator, long enough"


def signed_with(app: App, receiver: Receiver, webhook: int) -> Any:
    """The request that a test of the webhook makes."""
    assert app.base.post(f"{HOOKS}/{webhook}/test").status_code == 202
    deliver(app)
    return receiver.requests.pop()


def app_with(url: str, folder: Path, **settings: Any) -> Any:
    """The application; loopback is allowed to receive."""
    return running_app(url, folder, auth="off", webhook_allow_private=["127.0.0.0/8"], **settings)


def test_the_database_has_no_secret(make_database: MakeDatabase, tmp_path: Path) -> None:
    """Made, given, rotated: all are sealed, and sign all the same, the one before as well."""
    given = GIVEN
    with Receiver() as receiver, app_with(make_database(), tmp_path, webhook_key=KEY) as app:
        body = {"url": receiver.url, "secret": given}
        first = app.base.post(HOOKS, json=body).json()
        second = app.base.post(HOOKS, json={"url": receiver.url}).json()
        rotated = app.base.post(f"{HOOKS}/{second['id']}/rotate-secret", json={}).json()
        assert first["secret"] == given
        texts = stored(app)
        assert len(texts) == 3 and all(text.startswith(SEALED_PREFIX) for text in texts)
        for secret in (given, second["secret"], rotated["secret"]):
            assert secret.removeprefix("whsec_") not in json.dumps(texts)
        request = signed_with(app, receiver, first["id"])
        assert verify([given], request.headers, request.body, time.time())
        request = signed_with(app, receiver, second["id"])
        for secret in (second["secret"], rotated["secret"]):
            assert verify([secret], request.headers, request.body, time.time())


def test_a_key_that_comes_later_or_changes(make_database: MakeDatabase, tmp_path: Path) -> None:
    """The clean-up seals what is there, anew with another key; for clients nothing changes."""
    url = make_database()
    with Receiver() as receiver:
        with app_with(url, tmp_path) as app:
            made = app.base.post(HOOKS, json={"url": receiver.url}).json()
            one = f"{HOOKS}/{made['id']}"
            app.base.post(f"{one}/rotate-secret", json={"secret": made["secret"]})
            clean(app)
            assert stored(app) == [made["secret"]] * 2
            before = app.base.get(one).json()
        for keys in ({"webhook_key": KEY}, {"webhook_key": OTHER, "webhook_key_before": KEY}):
            with app_with(url, tmp_path, **keys) as app:
                sealed = stored(app)
                request = signed_with(app, receiver, made["id"])
                assert verify([made["secret"]], request.headers, request.body, time.time())
                clean(app)
                anew = stored(app)
                assert not set(sealed) & set(anew) and all(text.startswith(SEALED_PREFIX) for text in anew)
                clean(app)
                assert stored(app) == anew
                assert app.base.get(one).json() == before
        with app_with(url, tmp_path, webhook_key=OTHER) as app:
            request = signed_with(app, receiver, made["id"])
            assert verify([made["secret"]], request.headers, request.body, time.time())


def test_a_key_that_is_lost(make_database: MakeDatabase, tmp_path: Path) -> None:
    """Nothing goes out unsigned; the delivery says why, and a new secret is the way out."""
    url = make_database()
    with Receiver() as receiver:
        with app_with(url, tmp_path, webhook_key=KEY) as app:
            made = app.base.post(HOOKS, json={"url": receiver.url}).json()
        one = f"{HOOKS}/{made['id']}"
        with app_with(url, tmp_path, webhook_key=OTHER) as app:
            sealed = stored(app)
            clean(app)
            assert stored(app) == sealed  # it may be found again
            app.base.post(f"{one}/test")
            assert deliver(app) == 1
            assert receiver.requests == []
            (delivery,) = app.base.get(f"{one}/deliveries").json()["items"]
            assert delivery["state"] == "waiting" and "webhook_key" in delivery["error"]
            anew = app.base.post(f"{one}/rotate-secret", json={"overlap_seconds": 0}).json()
            deliver(app, 100)
            request = receiver.requests.pop()
            assert verify([anew["secret"]], request.headers, request.body, time.time() + 100)
