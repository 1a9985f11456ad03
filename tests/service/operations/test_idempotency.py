"""Idempotency-Key: a POST takes effect once, also if the database or the process fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from tests.support.app import App, running_app
from tests.support.catalog import API, Catalog, pages
from tests.support.catalog_roots import write_manifest
from tests.support.crashing import Instant, die_in_post
from tests.support.databases import MakeDatabase

KEY = {"Idempotency-Key": "k"}
HOOK = {"url": "https://93.184.215.14/hook"}
POLICY = {"name": "tidy", "root": "main", "keep": {"last": 2}}
RULE = {"name": "check", "actions": [{"kind": "verify"}]}
DAY = 86_400.0
POSTS: dict[str, tuple[str, Any]] = {
    "rule": ("/rules", RULE),
    "policy": ("/retention/policies", POLICY),
    "job": ("/jobs", {"kind": "verify", "params": {"checkpoint_id": 1}}),
    "verify": ("/checkpoints/1/verifications", None),
    "statistics": ("/checkpoints/1/statistics", None),
    "cancel": ("/jobs/1/cancel", None),
    "retry": ("/jobs/2/retry", None),
    "restore": ("/checkpoints/2/restore", None),
    "test": ("/webhooks/1/test", None),
    "redeliver": ("/webhooks/1/deliveries/1/redeliver", None),
    "run": ("/retention/policies/1/run", None),
    "register": ("/checkpoints", {"root": "main", "key": "trained/step-3"}),
}


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    """Start an application with two checkpoints (one deleted), an unregistered checkpoint, two jobs (one
    cancelled), a webhook with a delivery, and a policy."""
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, auth="off") as running:
        catalog = Catalog(running, tmp_path)
        for number in (1, 2):
            catalog.add(f"run/step-{number}")
        write_manifest(tmp_path / "main" / "trained" / "step-3")
        post = running.base.post
        made = [
            running.base.delete("/api/v1/checkpoints/2"),
            *(post(f"{API}/jobs", json={"kind": "scan", "params": {"root": r}}) for r in ("main", "other")),
            post(f"{API}/jobs/2/cancel"),
            post(f"{API}/webhooks", json=HOOK),
            post(f"{API}/webhooks/1/test"),
            post(f"{API}/retention/policies", json={**POLICY, "name": "first"}),
        ]
        assert all(answer.is_success for answer in made), [answer.text for answer in made]
        yield running


def done(app: App) -> int:
    """Return the number of audit entries, one for each effect."""
    return len(pages(app.base, "/audit", limit=500))


@pytest.mark.parametrize("name", POSTS)
def test_the_database_fails_after_the_commit(app: App, name: str) -> None:
    """If the database fails after the commit, the first and a repeated request still get the response."""
    path, body = POSTS[name]
    before, engine = done(app), app.service.database.writer
    passed: set[str] = set()

    def fail(*_: Any) -> None:
        if "committed" in passed:
            raise OperationalError("INSERT", {}, Exception("the database is away"))

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        passed.update({"noted"} if "INSERT INTO audit" in statement else ())

    def commit(*_: Any) -> None:
        passed.update({"committed"} if "noted" in passed else ())

    listeners = [("begin", fail), ("before_cursor_execute", look), ("commit", commit)]
    for moment, listener in listeners:
        event.listen(engine, moment, listener)
    first = app.base.post(f"{API}{path}", json=body, headers=KEY)
    assert "committed" in passed
    for moment, listener in listeners:
        event.remove(engine, moment, listener)
    after = done(app)
    again = app.base.post(f"{API}{path}", json=body, headers=KEY)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert first.is_success and (again.status_code, again.json()) == (first.status_code, first.json())
    for header in ("content-type", "location", "etag"):
        assert again.headers.get(header) == first.headers.get(header)
    assert done(app) == after > before


@pytest.mark.each_database
@pytest.mark.parametrize("instant", ["before the commit", "after the commit"])
def test_the_process_is_killed(make_database: MakeDatabase, tmp_path: Path, instant: Instant) -> None:
    """A process killed before the commit leaves no effect; after the commit the response is stored."""
    url = make_database()
    die_in_post(url, tmp_path, f"{API}/rules", RULE, "k", "automation_rules", instant)
    with running_app(url, tmp_path, auth="off") as app:
        is_done = instant == "after the commit"
        assert done(app) == is_done
        answer = app.base.post(f"{API}/rules", json=RULE, headers=KEY)
        if not is_done:
            assert answer.status_code == 409  # the first request may still be running
            app.service.clock = lambda: time.time() + 121
            answer = app.base.post(f"{API}/rules", json=RULE, headers=KEY)
        assert answer.status_code == 201
        assert ("Idempotency-Replayed" in answer.headers) == is_done
        assert app.base.get(answer.headers["Location"]).json() == answer.json()
        assert len(app.base.get(f"{API}/rules").json()["items"]) == done(app) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("make_database", ["postgresql"], indirect=True)
def test_an_overtaken_request_has_no_effect(make_database: MakeDatabase, tmp_path: Path) -> None:
    """A slow request whose reservation expired has no effect if another request took over."""
    begun, release, path = threading.Event(), threading.Event(), f"{API}/webhooks/1/test"
    reserved: set[str] = set()

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        reserved.update({"it"} if statement.startswith("INSERT INTO idempotency") else ())

    def wait(_: Any) -> None:
        if reserved and not begun.is_set():  # the next transaction has the effect
            begun.set()
            release.wait(30)

    with running_app(make_database(), tmp_path, auth="off") as app, ThreadPoolExecutor(1) as pool:
        assert app.base.post(f"{API}/webhooks", json=HOOK).is_success
        event.listen(app.service.database.writer, "before_cursor_execute", look)
        event.listen(app.service.database.writer, "begin", wait)
        slow = pool.submit(app.base.post, path, headers=KEY)
        try:
            assert begun.wait(30) and app.base.post(path, headers=KEY).status_code == 409
            app.service.clock = lambda: time.time() + 121
            quick = app.base.post(path, headers=KEY)
        finally:
            release.set()
        assert quick.is_success and slow.result(60).status_code == 409
        assert app.base.post(path, headers=KEY).json() == quick.json()
        assert len(pages(app.base, "/webhooks/1/deliveries")) == 1


def post(app: App, name: str = "check") -> Any:
    """Create a rule with the key."""
    return app.base.post(f"{API}/rules", json={**RULE, "name": name}, headers=KEY)


def test_responses_are_stored_for_a_day(app: App) -> None:
    """A response is stored for a day, then the key is free; a failed request frees the key at once."""
    first = post(app)
    assert (
        app.base.post(f"{API}/rules", json={"name": ""}, headers={"Idempotency-Key": "x"}).status_code == 422
    )
    again = app.base.post(f"{API}/rules", json={**RULE, "name": "x"}, headers={"Idempotency-Key": "x"})
    assert again.status_code == 201
    app.service.clock = lambda: time.time() + DAY - 60
    assert post(app).json() == first.json() and post(app, "another").status_code == 422
    app.service.clock = lambda: time.time() + DAY + 60
    assert post(app, "another").status_code == 201
