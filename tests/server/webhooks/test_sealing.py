"""Secrets of webhooks sealed with the operator's key: in the database nothing that signs."""

from __future__ import annotations

import base64
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import select

from dcp.server.automation.schedules import built_in_schedules
from dcp.server.database.tables import webhooks
from dcp.server.jobs.schedules import ScheduleContext
from dcp.server.settings import Settings
from dcp.server.webhooks import deliver_due
from dcp.server.webhooks.sealing import SEALED_PREFIX, Sealer, SealError
from dcp.server.webhooks.signing import key_of, new_secret, verify
from tests.support.app import App, running_app
from tests.support.databases import MakeDatabase
from tests.support.receivers import Receiver

HOOKS = "/api/v1/webhooks"
KEY, OTHER = "first key of the operator, long enough", "second key of the operator, long enough"


def secret_of(size_bytes: int) -> str:
    """One of that many bytes."""
    return "whsec_" + base64.b64encode(bytes(range(100, 100 + size_bytes))).decode()


def app_with(url: str, folder: Path, **settings: Any) -> Any:
    """The application; loopback is allowed to receive."""
    return running_app(url, folder, auth="off", webhook_allow_private=["127.0.0.0/8"], **settings)


def stored(app: App) -> list[str]:
    """All secrets as the database has them."""
    with app.service.database.read() as connection:
        rows = connection.execute(select(webhooks.c.secret, webhooks.c.previous_secret)).all()
    return [text for row in rows for text in row if text is not None]


def clean(app: App) -> None:
    """What the worker does every ten minutes."""
    (schedule,) = (one for one in built_in_schedules(app.service.settings) if one.name == "clean-up")
    schedule.act(ScheduleContext(app.service.settings, app.service.database, time.time(), threading.Event()))


def signed_with(app: App, receiver: Receiver, webhook: int) -> Any:
    """The request that a test of the webhook makes."""
    assert app.base.post(f"{HOOKS}/{webhook}/test").status_code == 202
    deliver_due(app.service, time.time())
    return receiver.requests.pop()


@pytest.mark.parametrize("size_bytes", [24, 32, 33, 64])
def test_only_the_key_opens(size_bytes: int) -> None:
    """Each seal is another one, shows nothing of the secret, and is opened by its key alone."""
    sealer, secret = Sealer((KEY.encode(),)), secret_of(size_bytes)
    seals = [sealer.seal(secret) for _ in range(3)]
    assert len(set(seals)) == 3
    for sealed in seals:
        assert sealed.startswith(SEALED_PREFIX) and secret.removeprefix("whsec_") not in sealed
        assert key_of(secret)[:8] not in base64.urlsafe_b64decode(sealed.removeprefix(SEALED_PREFIX))
        assert sealer.open(sealed) == secret
        for others in ((), (OTHER.encode(),)):
            with pytest.raises(SealError, match="webhook_key"):
                Sealer(others).open(sealed)
    assert Sealer((OTHER.encode(), KEY.encode())).open(seals[0]) == secret
    assert Sealer().seal(secret) == secret == sealer.open(secret)
    assert KEY not in repr(sealer)


def test_what_was_changed_is_not_opened() -> None:
    """Each byte counts, and so does the length."""
    sealer = Sealer((KEY.encode(),))
    data = base64.urlsafe_b64decode(sealer.seal(new_secret()).removeprefix(SEALED_PREFIX))
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for wrong in (*changed, data[:-1], data[1:], data + b"\0", b""):
        with pytest.raises(SealError):
            sealer.open(SEALED_PREFIX + base64.urlsafe_b64encode(wrong).decode())
    with pytest.raises(SealError):
        sealer.open(SEALED_PREFIX + "no base64")


def test_the_database_has_no_secret(make_database: MakeDatabase, tmp_path: Path) -> None:
    """Made, given, rotated: all are sealed, and sign all the same, the one before as well."""
    given = new_secret()
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
            assert deliver_due(app.service, time.time()) == 1
            assert receiver.requests == []
            (delivery,) = app.base.get(f"{one}/deliveries").json()["items"]
            assert delivery["state"] == "waiting" and "webhook_key" in delivery["error"]
            anew = app.base.post(f"{one}/rotate-secret", json={"overlap_seconds": 0}).json()
            deliver_due(app.service, time.time() + 100)
            request = receiver.requests.pop()
            assert verify([anew["secret"]], request.headers, request.body, time.time() + 100)


@pytest.mark.parametrize("wrong", [{"webhook_key": "short"}, {"webhook_key_before": KEY}])
def test_keys_that_cannot_be_meant(wrong: dict[str, str]) -> None:
    """Too short to be one, or one to open with and none to seal with: the service does not start."""
    with pytest.raises(ValidationError, match="webhook_key"):
        Settings.model_validate(wrong)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plain word, and no repr of the settings shows it."""
    monkeypatch.setenv("DCP_SERVER_WEBHOOK_KEY", KEY)
    settings = Settings()
    assert Sealer.from_settings(settings).keys == (KEY.encode(),)
    assert KEY not in repr(settings)
