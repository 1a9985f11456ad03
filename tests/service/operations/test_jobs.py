"""Jobs over HTTP: lists, progress, logs, cancellation and event streams."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import httpx
import pytest
from sqlalchemy import event as sqlalchemy_event

from tests.support.catalog import API, Catalog, pages
from tests.support.sockets import listening

JOBS = f"{API}/jobs"
SOCKETS = httpx.Client(
    verify=False, trust_env=False, timeout=120, limits=httpx.Limits(max_keepalive_connections=0)
)
"""A shared client: creating a client takes longer than a test."""


def submit(catalog: Catalog, below: str = "", root: str = "main", **more: Any) -> int:
    """Submit a scan of a folder, and return its id."""
    body = {"kind": "scan", "params": {"root": root, "below": below}, **more}
    return int(catalog.http.post(JOBS, json=body).json()["id"])


def plan(catalog: Catalog, tasks: int) -> None:
    """Complete the plan of the next job with this number of tasks, of ten bytes each."""
    made = catalog.worker.claim()
    assert made is not None and made.phase == "plan"
    (task,), data = catalog.worker.carry_out(made)
    catalog.worker.complete(made, ([replace(task, weight_bytes=10)] * tasks, data))


def do_next(catalog: Catalog) -> str:
    """Complete the next work, and return its phase."""
    made = catalog.worker.claim()
    assert made is not None
    catalog.worker.complete(made, {})
    return str(made.phase)


def shown(catalog: Catalog, number: int, below: str = "", **query: Any) -> Any:
    """Return a job as the API shows it."""
    return catalog.get(f"/jobs/{number}{below}", **query)


def test_lists_are_filtered_and_paged(catalog: Catalog) -> None:
    """Jobs are filtered by state, kind, root, checkpoint and creator, and read in pages."""
    checkpoint = catalog.add("run/step-1")
    ids = [submit(catalog, f"run-{n}") for n in range(5)]
    someone = catalog.app.client("read", "write", name="someone")
    body = {"kind": "verify", "params": {"checkpoint_id": checkpoint}}
    about = someone.post(JOBS, json=body).json()["id"]
    other = submit(catalog, root="other")
    catalog.http.post(f"{JOBS}/{ids[0]}/cancel")
    expected = {
        "": [other, about, *reversed(ids)],
        "state=cancelled": [ids[0]],
        "state=cancelled&state=queued&kind=scan&root=main": [*reversed(ids)],
        "root=other": [other],
        f"checkpoint_id={checkpoint}": [about],
        "created_by=key:someone": [about],
    }
    for query, numbers in expected.items():
        listed = catalog.http.get(f"{JOBS}?{query}").json()["items"]
        assert [job["id"] for job in listed] == numbers, query
    assert [job["id"] for job in pages(catalog.http, "/jobs", kind="scan", limit=2)] == [other, *ids[::-1]]
    cursor = catalog.get("/jobs", limit=1)["next_cursor"]
    assert catalog.status("GET", f"/jobs?limit=1&kind=scan&cursor={cursor}") == 422


def test_progress_tasks_speed_and_log_are_shown(catalog: Catalog) -> None:
    """The API shows progress, throughput, tasks and a log of sentences, the latest first."""
    catalog.app.service.clock = lambda: time.time() + 4000  # ahead of the worker's clock by more than an hour
    number = submit(catalog)
    assert shown(catalog, number)["progress"] is None
    assert shown(catalog, number, "/throughput")["bytes_per_second"] is None
    plan(catalog, 3)
    do_next(catalog)
    running = catalog.worker.claim()
    assert running is not None
    expected = {"done_tasks": 1, "total_tasks": 3, "done_bytes": 10, "total_bytes": 30}
    assert shown(catalog, number)["progress"] == catalog.get("/jobs")["items"][0]["progress"] == expected
    speed = shown(catalog, number, "/throughput")
    assert speed["seconds_left"] == pytest.approx(20 / speed["bytes_per_second"])
    tasks = pages(catalog.http, f"/jobs/{number}/tasks", limit=2)
    assert [(task["number"], task["state"]) for task in tasks] == [
        (0, "succeeded"),
        (1, "running"),
        (2, "queued"),
    ]
    catalog.worker.complete(running, TypeError("it is away"))
    failed = shown(catalog, number, "/tasks")["items"][1]
    assert failed["attempt"] == 1 and "it is away" in failed["error"]["detail"]
    page = shown(catalog, number, "/log", limit=2)
    assert "it is away" in page["items"][-1]["text"]
    older = pages(catalog.http, f"/jobs/{number}/log", limit=2, cursor=page["next_cursor"])
    assert [line["text"] for line in older[:2]] == ["submitted by key:boss", "planning"]
    stranger = catalog.app.client("read", roots=["other"])
    for below in ("log", "throughput"):
        assert catalog.status("GET", f"/jobs/{number}/{below}", stranger) == 404


def test_cancelling_and_retrying(catalog: Catalog) -> None:
    """Cancelling and retrying return 202 and the job, or 409 if the state does not allow them."""
    number = submit(catalog)

    def ask(action: str) -> Any:
        return catalog.http.post(f"{JOBS}/{number}/{action}")

    assert ask("retry").status_code == 409
    plan(catalog, 1)
    cancelled = ask("cancel")
    assert (cancelled.status_code, cancelled.json()["is_ending"]) == (202, True)
    assert ask("cancel").status_code == 202
    assert do_next(catalog) == "discard"
    assert ask("cancel").json()["state"] == "cancelled"
    retried = ask("retry")
    assert (retried.status_code, retried.json()["state"]) == (202, "queued")
    catalog.work()
    assert shown(catalog, number)["state"] == "succeeded"
    assert [ask(action).status_code for action in ("cancel", "retry")] == [409, 409]
    entries = pages(catalog.http, "/audit", target=f"job:{number}")
    assert [entry["action"] for entry in entries][:2] == ["job.retry", "job.cancel"]


# -- server-sent events --------------------------------------------------------------------------------------


@pytest.fixture
def url(catalog: Catalog) -> Iterator[str]:
    """Return the URL of the application on a socket."""
    with listening(catalog.app.app) as place:
        yield place


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream as fields, with parsed data; a comment is ``{"": text}``."""
    fields: dict[str, Any] = {}
    for line in answer.iter_lines():
        if not line:
            if fields:
                yield fields
            fields = {}
            continue
        name, _, value = line.partition(":")
        fields[name] = json.loads(value) if name == "data" else value.strip()


@contextmanager
def stream(place: str, key: str, last: str | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """Open a stream, and yield its events without comments."""
    headers = {"Authorization": f"Bearer {key}"} | ({} if last is None else {"Last-Event-ID": last})
    with SOCKETS.stream("GET", place, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (event for event in events_of(answer) if "" not in event)


def kept(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events with an id."""
    return [event for event in events if "id" in event]


def test_events_are_followed_to_the_end_and_replayed(catalog: Catalog, url: str) -> None:
    """A stream has all events from the first to `end`, and progress; Last-Event-ID resumes without a gap."""
    number, key = submit(catalog), catalog.app.key("read")
    place = f"{url}{JOBS}/{number}/events"
    with stream(place, key) as events:
        first = next(events)
        assert (first["event"], first["data"]["kind"]) == ("submitted", "submitted")
        plan(catalog, 2)
        for _ in range(3):
            do_next(catalog)
        found = [first, *events]
    states = [event["data"]["data"].get("state") for event in kept(found)[1:]]
    assert states == ["planning", "running", "publishing", "succeeded"]
    ids = [event["id"] for event in kept(found)]
    assert sorted(ids, key=int) == ids
    assert all(e["data"]["job_id"] == number and e["data"]["at"].endswith("Z") for e in kept(found))
    progress = [event["data"] for event in found if event.get("event") == "progress"][-1]
    assert (progress["done_tasks"], progress["total_tasks"]) == (2, 2)
    assert (found[-1]["event"], found[-1]["data"]) == ("end", {"state": "succeeded"})
    for seen in (0, 2):
        with stream(place, key, ids[seen]) as events:
            assert [event["id"] for event in kept([*events])] == ids[seen + 1 :]
    headers = {"Authorization": f"Bearer {key}", "Last-Event-ID": ids[-1]}
    assert SOCKETS.get(place, headers=headers).status_code == 204


def test_a_stream_has_the_events_of_all_jobs(catalog: Catalog, url: str) -> None:
    """The stream of all jobs starts now or behind an event, without hidden roots; scans are optional."""
    before = submit(catalog)
    with stream(f"{url}{JOBS}/events", catalog.app.key("read", roots=["main"])) as events:
        ready = next(events)
        assert ready["event"] == "ready"
        submit(catalog, root="other")
        after = submit(catalog, "after")
        plan(catalog, 2)
        found: list[dict[str, Any]] = []
        while not any(event["event"] == "progress" for event in found):
            found.append(next(events))
    numbers = [(event["data"]["job_id"], event["data"]["kind"]) for event in kept(found)]
    assert numbers == [(after, "submitted"), (before, "state"), (before, "state")]
    assert (found[-1]["data"]["job_id"], found[-1]["data"]["total_tasks"]) == (before, 2)
    with stream(f"{url}{JOBS}/events?scans=true", catalog.app.key("read"), ready["id"]) as events:
        again = [event for event in islice(events, 6) if event["event"] not in ("ready", "progress")]
        assert [event["data"]["kind"] for event in again][:4] == ["submitted"] * 2 + ["state"] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("make_database", ["postgresql"], indirect=True)
def test_events_of_late_commits_are_sent(catalog: Catalog, url: str) -> None:
    """An event of a transaction that commits late is sent, once."""
    ids, delays = [submit(catalog, name) for name in "ab"], [2.0]
    engine = catalog.app.service.database.writer

    def note(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if delays and statement.startswith("INSERT INTO job_events"):
            connection.info["late"] = delays.pop()

    def slow(connection: Any) -> None:
        time.sleep(connection.info.pop("late", 0.0))

    with stream(f"{url}{JOBS}/events", catalog.app.key("read")) as events, ThreadPoolExecutor(2) as pool:
        next(events)
        sqlalchemy_event.listen(engine, "before_cursor_execute", note)
        sqlalchemy_event.listen(engine, "commit", slow)
        for number in ids:
            pool.submit(catalog.http.post, f"{JOBS}/{number}/cancel")
            time.sleep(0.5)
        found = [event["id"] for event in islice(events, 4)]
    assert found != sorted(found, key=int) and len({*found}) == 4


def test_streams_of_an_account_are_limited(catalog: Catalog, url: str) -> None:
    """All keys of an account share 32 streams: the next gets 429 until another ends."""
    place = f"{url}{JOBS}/{submit(catalog)}/events"
    number = catalog.http.post(f"{API}/accounts", json={"name": "ci"}).json()["id"]
    catalog.http.post(f"{API}/grants", json={"account_id": number, "role": "viewer", "root": None})
    made = [{"name": name, "account_id": number} for name in ("one", "two")]
    keys = [catalog.http.post(f"{API}/keys", json=one).json()["key"] for one in made]
    headers, others = ({"Authorization": f"Bearer {key}"} for key in keys)
    with ExitStack() as stack:
        first, *_ = [
            stack.enter_context(SOCKETS.stream("GET", place, headers=one))
            for one in [headers] * 16 + [others] * 16
        ]
        refused = SOCKETS.get(place, headers=headers)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        with stream(place, catalog.app.key("read", name="other")) as events:
            assert next(events)["event"] == "submitted"
        first.close()
        for _ in range(600):
            with SOCKETS.stream("GET", place, headers=headers) as answer:
                if answer.status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError("a stream that has ended still counts")


@pytest.mark.exhaustive  # a heartbeat every fifteen seconds
def test_a_stream_without_events_has_a_heartbeat(catalog: Catalog, url: str) -> None:
    """Comments keep an idle connection open through proxies, and show that the server is alive."""
    headers = {"Authorization": f"Bearer {catalog.app.key('read')}"}
    place = f"{url}{JOBS}/{submit(catalog)}/events"
    with SOCKETS.stream("GET", place, headers=headers) as answer:
        assert sum("" in event for event in islice(events_of(answer), 4)) >= 2


def test_streams_end_with_their_key(catalog: Catalog, url: str) -> None:
    """Streams end within seconds of a revoked key or a lost role; other streams continue."""
    place, app = f"{url}{JOBS}/{submit(catalog)}/events", catalog.app
    number = catalog.http.post(f"{API}/accounts", json={"name": "ci"}).json()["id"]
    role = {"account_id": number, "role": "viewer", "root": None}
    grant = catalog.http.post(f"{API}/grants", json=role).json()
    owned = catalog.http.post(f"{API}/keys", json={"name": "own", "account_id": number}).json()["key"]
    with (
        stream(place, app.key("read", name="one")) as ended,
        stream(place, owned) as of_account,
        stream(place, app.key("read", name="other")) as going_on,
    ):
        for events in (ended, of_account, going_on):
            assert "id" in next(events)
        assert catalog.status("DELETE", f"/grants/{grant['id']}") == 204
        assert [*of_account] == []
        (number,) = [key["id"] for key in catalog.get("/keys")["items"] if key["name"] == "one"]
        assert catalog.status("DELETE", f"/keys/{number}") == 200
        begun = time.monotonic()
        assert [*ended] == []
        assert time.monotonic() - begun < 60
        plan(catalog, 1)
        assert "id" in next(going_on)
