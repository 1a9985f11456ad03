"""A POST with an Idempotency-Key takes effect once. Internal: answers of dead processes are rows.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.exc import OperationalError

from dcp.server.database import tables
from dcp.server.database.engine import Database
from dcp.server.http import kept_answers
from dcp.server.http.kept_answers import (
    TAKEN_SECONDS,
    KeptAnswer,
    Reservation,
    begin,
    finish,
    forget,
    forget_old,
    hash_of,
    keep,
)
from dcp.server.problems import ConflictError, UnprocessableError
from tests.support.app import App, running_app
from tests.support.catalog_roots import write_manifest
from tests.support.catalog_rows import add_checkpoint
from tests.support.crashing import Instant, die_in_post
from tests.support.databases import MakeDatabase

KEY = {"Idempotency-Key": "k"}
HOOK = {"url": "https://93.184.215.14/hook"}
POLICY = {"name": "tidy", "root": "main", "keep": {"last": 2}}
RULE = {"name": "check", "actions": [{"kind": "verify"}]}
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
def app(make_database: MakeDatabase, tmp_path: Path) -> Iterator[App]:
    """With a checkpoint, a deleted one, one that nobody has told of, a job, a cancelled one, a webhook with a
    delivery, and a policy."""
    with running_app(make_database(), tmp_path, auth="off") as running:
        write_manifest(tmp_path / "main" / "trained" / "step-3")
        for number in (1, 2):
            add_checkpoint(running.service.database, f"run/step-{number}")
        post = running.base.post
        made = [
            running.base.delete("/api/v1/checkpoints/2"),
            post("/api/v1/jobs", json={"kind": "scan", "params": {"root": "main"}}),
            post("/api/v1/jobs", json={"kind": "scan", "params": {"root": "other"}}),
            post("/api/v1/jobs/2/cancel"),
            post("/api/v1/webhooks", json=HOOK),
            post("/api/v1/webhooks/1/test"),
            post("/api/v1/retention/policies", json={**POLICY, "name": "first"}),
        ]
        assert all(answer.is_success for answer in made), [answer.text for answer in made]
        yield running


def audit_rows(app: App) -> int:
    """One for each thing that was done."""
    with app.service.database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(tables.audit)).scalar_one())


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", POSTS)
def test_the_database_goes_away_behind_the_effect(app: App, name: str) -> None:
    """Whatever comes after its commit: the answer is known, and a second request gets it."""
    path, body = POSTS[name]
    before = audit_rows(app)
    engine = app.service.database.writer
    noted: list[bool] = []
    committed: list[bool] = []

    def fail(*_: Any) -> None:
        if committed:
            raise OperationalError("INSERT", {}, Exception("the database is away"))

    def note(*_: Any) -> None:
        if noted:
            committed.append(True)

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "INSERT INTO audit" in statement:
            noted.append(True)

    listeners = [("begin", fail), ("before_cursor_execute", look), ("commit", note)]
    for what, listener in listeners:
        event.listen(engine, what, listener)
    first = app.base.post(f"/api/v1{path}", json=body, headers=KEY)
    assert committed
    for what, listener in listeners:
        event.remove(engine, what, listener)
    after = audit_rows(app)
    again = app.base.post(f"/api/v1{path}", json=body, headers=KEY)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert first.is_success and (again.status_code, again.json()) == (first.status_code, first.json())
    for header in ("content-type", "location", "etag"):
        assert again.headers.get(header) == first.headers.get(header)
    assert audit_rows(app) == after > before


@pytest.mark.parametrize("instant", ["before the commit", "after the commit"])
def test_the_process_is_killed(make_database: MakeDatabase, tmp_path: Path, instant: Instant) -> None:
    """Before the commit nothing was done, and a later request does it; after it the answer is there."""
    url = make_database()
    die_in_post(url, tmp_path, "/api/v1/rules", RULE, "k", "automation_rules", instant)
    with running_app(url, tmp_path, auth="off") as app:
        is_done = instant == "after the commit"
        assert audit_rows(app) == is_done
        answer = app.base.post("/api/v1/rules", json=RULE, headers=KEY)
        if not is_done:
            assert answer.status_code == 409  # as far as anybody knows it is being worked on
            app.service.clock = lambda: time.time() + TAKEN_SECONDS + 1
            answer = app.base.post("/api/v1/rules", json=RULE, headers=KEY)
        assert answer.status_code == 201
        assert ("Idempotency-Replayed" in answer.headers) == is_done
        assert app.base.get(answer.headers["Location"]).json() == answer.json()
        assert len(app.base.get("/api/v1/rules").json()["items"]) == 1
        assert audit_rows(app) == 1


NOW = 1_700_000_000.0
ONE = hash_of("POST", "/a", b"", b"{}")
TWO = hash_of("POST", "/a", b"", b"{ }")


def test_hashes_tell_requests_apart() -> None:
    """Each part counts, and where one ends and the next begins."""
    requests = [
        ("POST", "/a", b"", b"x"),
        ("POST", "/a", b"x", b""),
        ("POST", "/ax", b"", b""),
        ("POST", "/a", b"", b""),
        ("PUT", "/a", b"", b""),
    ]
    assert len({hash_of(*request) for request in requests}) == len(requests)


def test_the_first_answer_is_given_again(database: Database) -> None:
    """To its caller, for the same request, for a day."""
    answer = KeptAnswer(201, {"location": "/a/1"}, b'{"id": 1}')
    assert begin(database, "a", "key", ONE, NOW) is None
    with pytest.raises(ConflictError) as working:
        begin(database, "a", "key", ONE, NOW + 1)
    assert (working.value.extra["state"], working.value.headers["Retry-After"]) == ("working", "1")
    finish(database, Reservation("a", "key", NOW), answer)
    assert begin(database, "a", "key", ONE, NOW + 2) == answer
    with pytest.raises(UnprocessableError):
        begin(database, "a", "key", TWO, NOW + 2)
    assert begin(database, "b", "key", TWO, NOW + 2) is None
    assert begin(database, "a", "key", TWO, NOW + kept_answers.KEPT_SECONDS + 1) is None


def test_a_request_that_never_ended(database: Database) -> None:
    """Its process may be dead: after a while the next is taken for it. What failed is free at once."""
    assert begin(database, "a", "key", ONE, NOW, taken_seconds=100) is None
    with pytest.raises(ConflictError):
        begin(database, "a", "key", ONE, NOW + 99, taken_seconds=100)
    assert begin(database, "a", "key", ONE, NOW + 101, taken_seconds=100) is None
    forget(database, Reservation("a", "key", NOW + 101))
    assert begin(database, "a", "key", TWO, NOW + 102, taken_seconds=100) is None
    finish(database, Reservation("a", "key", NOW + 102), KeptAnswer(200, {}, b""))
    forget(database, Reservation("a", "key", NOW + 102))  # not what has been answered
    assert begin(database, "a", "key", TWO, NOW + 103) is not None


def test_who_was_overtaken_does_nothing(database: Database) -> None:
    """A request that is slower than another one is patient neither keeps an answer nor frees the key."""
    begin(database, "a", "key", ONE, NOW, taken_seconds=100)
    slow, quick = (Reservation("a", "key", since) for since in (NOW, NOW + 101))
    assert begin(database, "a", "key", ONE, quick.since_seconds, taken_seconds=100) is None
    forget(database, slow)
    finish(database, slow, KeptAnswer(200, {}, b"slow"))
    with pytest.raises(ConflictError), database.write() as connection:
        keep(connection, slow, KeptAnswer(200, {}, b"slow"))
    with pytest.raises(ConflictError):
        begin(database, "a", "key", ONE, NOW + 102, taken_seconds=100)
    with database.write() as connection:
        keep(connection, quick, KeptAnswer(201, {}, b"quick"))
    assert begin(database, "a", "key", ONE, NOW + 103) == KeptAnswer(201, {}, b"quick")


def test_old_ones_are_forgotten(database: Database) -> None:
    """After a day, and not before."""
    begin(database, "a", "old", ONE, NOW)
    finish(database, Reservation("a", "old", NOW), KeptAnswer(200, {}, b"x"))
    begin(database, "a", "new", ONE, NOW + 10)
    finish(database, Reservation("a", "new", NOW + 10), KeptAnswer(200, {}, b"x"))
    forget_old(database, NOW + kept_answers.KEPT_SECONDS + 5)
    later = NOW + kept_answers.KEPT_SECONDS + 6
    assert begin(database, "a", "new", ONE, later) is not None
    assert begin(database, "a", "old", TWO, later) is None
