"""The secrets of webhooks: in the database (in clear text without a `webhook_key`), and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.app import App, running_app
from tests.support.databases import MakeDatabase
from tests.support.hook_bench import clean, deliver, rows
from tests.support.receivers import Receiver

HOOKS = "/api/v1/webhooks"


@pytest.fixture
def app(make_database: MakeDatabase, tmp_path: Path) -> Iterator[App]:
    """The application on each database; loopback is allowed to receive."""
    with running_app(make_database(), tmp_path, auth="off", webhook_allow_private=["127.0.0.0/8"]) as running:
        yield running


def test_nobody_is_shown_them(app: App, capfd: pytest.CaptureFixture[str]) -> None:
    """Answers but the first, problems, the audit log, kept answers, deliveries and logs do not have them."""
    first, second = ("whsec_" + letter * 43 + "=" for letter in "AB")
    refused = f"{first}*"
    http, answers = app.base, []
    with Receiver(answers=[500]) as receiver:
        body = {"url": receiver.url, "secret": first}
        made = http.post(HOOKS, json=body, headers={"Idempotency-Key": "once"})
        one = f"{HOOKS}/{made.json()['id']}"
        rotated = http.post(f"{one}/rotate-secret", json={"secret": second})
        assert (made.json()["secret"], rotated.json()["secret"]) == (first, second)
        answers += [http.post(f"{one}/test"), http.post(HOOKS, json={**body, "secret": refused})]
        assert answers[-1].status_code == 422
        answers += [http.post(HOOKS, json={**body, "nonsense": first})]
        stale = {"If-Match": '"w1-99"'}
        answers += [http.post(f"{one}/rotate-secret", json={"secret": second}, headers=stale)]
        deliver(app)
        assert len(receiver.requests) == 1
    paths = [HOOKS, one, f"{one}/deliveries", "/api/v1/audit", "/metrics", "/readyz", "/openapi.json"]
    answers += [http.get(path) for path in paths]
    answers += [http.patch(one, json={"description": "other"}), http.delete(one, headers=stale)]
    stored = rows(app)
    assert first in stored.pop("webhooks")
    out, err = capfd.readouterr()
    sent = [json.dumps(dict(request.headers)) + request.body.decode() for request in receiver.requests]
    texts = [*(answer.text for answer in answers), *stored.values(), out, err, *sent]
    for secret in (first, second, refused):
        for text in texts:
            assert secret not in text and secret.removeprefix("whsec_") not in text
    assert "webhook.rotate" in stored["audit"]


def test_a_rotated_one_is_not_kept(app: App) -> None:
    """Once it does not sign any more the clean-up removes it; before, it stays."""
    made = app.base.post(HOOKS, json={"url": "https://93.184.215.14/hook"}).json()
    app.base.post(f"{HOOKS}/{made['id']}/rotate-secret", json={"overlap_seconds": 60})

    def kept_after(seconds: float) -> Any:
        clean(app, seconds)
        return made["secret"] in rows(app)["webhooks"]

    assert [kept_after(0), kept_after(61)] == [True, False]
    assert app.base.get(f"{HOOKS}/{made['id']}").json()["previous_secret_until"] is None
