"""Jobs over HTTP. Internal: steps of jobs between two polls are written straight into the ledger.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import text
from sse_starlette.sse import AppStatus

from dcp.server.app import API
from dcp.server.catalog import audit
from dcp.server.jobs import following, ledger
from dcp.server.jobs.cleaning import forget_jobs
from dcp.server.jobs.ledger import FailureFacts, JobSpec, TaskSpec
from dcp.server.routes.jobs import job_events
from dcp.server.security.keys import list_keys, revoke_key
from tests.support.app import App
from tests.support.catalog_rows import add_checkpoint
from tests.support.sockets import listening

JOBS = f"{API}/jobs"


def submit(app: App, kind: str = "verify", **changes: Any) -> int:
    """A job that nobody does; its id."""
    spec = JobSpec(**{"kind": kind, "params": {}, "created_by": "test", "root": "main"} | changes)
    made: int = app.service.database.transact(lambda one: ledger.submit(one, spec, time.time()))
    return made


def step(app: App, act: Any, *arguments: Any) -> Any:
    """One transaction of the ledger."""
    return app.service.database.transact(lambda connection: act(connection, *arguments))


def claim(app: App) -> ledger.Claim:
    """As a worker does it."""
    made = step(app, ledger.claim, "worker", time.time(), 1000.0)
    assert made is not None
    return made  # type: ignore[no-any-return]


def plan(app: App, job_id: int, task_count: int) -> None:
    """Of the job, which is the next."""
    made = claim(app)
    assert (made.job.id, made.phase) == (job_id, "plan")
    specs = [TaskSpec(payload={}, weight_bytes=10)] * task_count
    step(app, ledger.complete_plan, made.held, {}, specs, time.time())


def end(app: App, job_id: int) -> None:
    """Do all that is left to do of the job, which is the only one."""
    while not step(app, ledger.get_job, job_id).is_final:
        made = claim(app)
        if made.phase == "task":
            step(app, ledger.complete_task, made.held, {}, time.time())
        else:
            step(app, ledger.complete_publish, made.held, {"is": "done"}, time.time())


def test_lists_are_filtered_and_paged(app: App) -> None:
    """By state, kind, root, checkpoint and maker; each page goes on where the last one ended."""
    checkpoint_id = add_checkpoint(app.service.database, "run/step-1")
    ids = [submit(app) for _ in range(5)]
    about = submit(app, kind="stats", checkpoint_id=checkpoint_id, created_by="someone")
    other = submit(app, kind="scan", root="other")
    client = app.client("read", "write")
    client.post(f"{JOBS}/{ids[0]}/cancel")

    def listed(query: str) -> list[int]:
        answer = client.get(f"{JOBS}?{query}")
        assert answer.status_code == 200, answer.text
        return [job["id"] for job in answer.json()["items"]]

    assert listed("") == [other, about, *reversed(ids)]
    assert listed("state=cancelled") == [ids[0]]
    assert listed("state=cancelled&state=queued&kind=verify") == list(reversed(ids))
    assert listed("root=other") == [other]
    assert listed(f"checkpoint_id={checkpoint_id}") == listed("created_by=someone") == [about]
    seen: list[int] = []
    query = "kind=verify&limit=2"
    page = client.get(f"{JOBS}?{query}").json()
    while True:
        seen += [job["id"] for job in page["items"]]
        if page["next_cursor"] is None:
            break
        page = client.get(f"{JOBS}?{query}&cursor={page['next_cursor']}").json()
    assert seen == list(reversed(ids))
    cursor = client.get(f"{JOBS}?limit=1").json()["next_cursor"]
    assert client.get(f"{JOBS}?limit=1&kind=scan&cursor={cursor}").status_code == 422


def test_progress_and_tasks_are_shown(app: App) -> None:
    """How far a job is, and each of its tasks, while it runs and after."""
    job_id = submit(app)
    client = app.client("read")
    assert client.get(f"{JOBS}/{job_id}").json()["progress"] is None
    plan(app, job_id, 3)
    step(app, ledger.complete_task, claim(app).held, {}, time.time())
    running = claim(app)
    step(app, ledger.renew, "worker", {running.held: 4}, time.time(), 100.0)
    shown = client.get(f"{JOBS}/{job_id}").json()
    expected = {"done_tasks": 1, "total_tasks": 3, "done_bytes": 14, "total_bytes": 30}
    assert (shown["state"], shown["progress"]) == ("running", expected)
    assert client.get(JOBS).json()["items"][0]["progress"] == expected
    page = client.get(f"{JOBS}/{job_id}/tasks?limit=2").json()
    assert [(task["number"], task["state"]) for task in page["items"]] == [(0, "succeeded"), (1, "running")]
    rest = client.get(f"{JOBS}/{job_id}/tasks?limit=2&cursor={page['next_cursor']}").json()
    assert [task["state"] for task in rest["items"]] == ["queued"] and rest["next_cursor"] is None
    error = FailureFacts(type="StorageError", detail="it is away")
    step(app, ledger.fail, running.held, error, time.time())
    failed = client.get(f"{JOBS}/{job_id}/tasks").json()["items"][1]
    assert (failed["attempt"], failed["error"]["detail"]) == (1, "it is away") and failed["not_before"]


def test_cancelling_and_retrying(app: App) -> None:
    """202 with the job as it is then; 409 where there is nothing to stop, or to do again."""
    job_id = submit(app, dedup_key="one")
    client = app.client("read", "write")
    assert client.post(f"{JOBS}/{job_id}/retry").status_code == 409
    plan(app, job_id, 1)
    answer = client.post(f"{JOBS}/{job_id}/cancel")
    assert answer.status_code == 202
    assert (answer.json()["state"], answer.json()["is_ending"]) == ("running", True)
    assert client.post(f"{JOBS}/{job_id}/cancel").status_code == 202
    step(app, ledger.complete_discard, claim(app).held, time.time())
    assert client.post(f"{JOBS}/{job_id}/cancel").json()["state"] == "cancelled"
    retried = client.post(f"{JOBS}/{job_id}/retry")
    assert (retried.status_code, retried.json()["state"]) == (202, "queued")
    plan(app, job_id, 1)
    end(app, job_id)
    shown = client.get(f"{JOBS}/{job_id}").json()
    assert (shown["state"], shown["result"]) == ("succeeded", {"is": "done"})
    for action in ("cancel", "retry"):
        assert client.post(f"{JOBS}/{job_id}/{action}").status_code == 409
    with app.service.database.read() as connection:
        entries = audit.audit_page(connection, target=f"job:{job_id}").entries
    assert [entry.action for entry in entries] == ["job.retry", "job.cancel"]


# -- server-sent events --------------------------------------------------------------------------------------


def read_events(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Events of a stream, as their fields; comments as ``{"": text}``."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if fields:
                yield fields
            fields = {}
            continue
        name, _, value = line.partition(":")
        fields[name] = value.strip()


def watch(url: str, key: str, job_id: int, last_id: str | None = None) -> Iterator[dict[str, str]]:
    """The events of a job, until the stream ends."""
    return listen(f"{url}{JOBS}/{job_id}/events", key, last_id)


def listen(url: str, key: str, last_id: str | None = None) -> Iterator[dict[str, str]]:
    """The events of a stream, until it ends."""
    headers = {"Authorization": f"Bearer {key}"} | ({} if last_id is None else {"Last-Event-ID": last_id})
    with httpx.stream("GET", url, headers=headers, timeout=120, verify=False) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield from read_events(answer.iter_lines())


def test_events_are_followed_to_the_end(app: App) -> None:
    """All from the beginning, as they come; progress in between; `end` is the last."""
    job_id = submit(app)
    with listening(app.app) as url:
        events = watch(url, app.key("read"), job_id)
        found = [event for event in (next(events), next(events)) if "id" in event]
        assert [event["event"] for event in found] == ["submitted"]
        plan(app, job_id, 2)
        end(app, job_id)
        found += list(events)
    kept = [json.loads(event["data"]) for event in found if "id" in event]
    assert [event["kind"] for event in kept] == ["submitted", *["state"] * 4]
    assert [event["data"].get("state") for event in kept[1:]] == [
        "planning",
        "running",
        "publishing",
        "succeeded",
    ]
    assert [event["id"] for event in kept] == sorted(event["id"] for event in kept)
    assert all(event["job_id"] == job_id and event["at"].endswith("Z") for event in kept)
    last = [json.loads(event["data"]) for event in found if event.get("event") == "progress"][-1]
    assert (last["done_tasks"], last["total_tasks"]) == (2, 2)
    assert found[-1]["event"] == "end" and json.loads(found[-1]["data"]) == {"state": "succeeded"}


@pytest.mark.parametrize("last", ["+0.0", "-1", "1_0", "1.0", "\u0661", "x", ""])
def test_what_is_no_events_id_is_refused(app: App, last: str) -> None:
    """Also spellings of a number that no event is sent with."""
    client, headers = app.client("read"), {b"Last-Event-ID": last.encode()}
    for stream in (f"{JOBS}/events", f"{JOBS}/{submit(app)}/events"):
        assert client.get(stream, headers=headers).status_code == 422


def test_one_stream_has_the_events_of_all_jobs(app: App) -> None:
    """From now on, or behind an event, of jobs that the key may see; own scans if they are asked for."""
    before = submit(app)
    with listening(app.app) as url:
        stream = listen(f"{url}{JOBS}/events", app.key("read", roots=["main"]))
        ready = next(event for event in stream if "id" in event)
        assert ready["event"] == "ready"
        submit(app, root="other")
        submit(app, kind="scan", created_by="system")
        job_id = submit(app)
        plan(app, before, 2)
        found: list[dict[str, str]] = []
        while not any(event.get("event") == "progress" for event in found):
            found.append(next(stream))
        stream.close()  # type: ignore[attr-defined]
        told = [json.loads(event["data"]) for event in found if "id" in event]
        assert [(one["job_id"], one["kind"]) for one in told] == [
            (job_id, "submitted"),
            (before, "state"),
            (before, "state"),
        ]
        progress = json.loads(found[-1]["data"])
        assert (progress["job_id"], progress["total_tasks"]) == (before, 2)
        again = listen(f"{url}{JOBS}/events?scans=true", app.key("read"), ready["id"])
        replayed = [event for event in (next(again) for _ in range(7)) if event.get("event") != "ready"]
        kinds = [json.loads(event["data"])["kind"] for event in replayed if "id" in event]
        assert kinds == ["submitted"] * 3 + ["state"] * 2
        again.close()  # type: ignore[attr-defined]


def test_events_that_become_visible_late_are_told() -> None:
    """Transactions need not end in the order of their events' numbers; each event is told once."""
    seen: list[int] = []
    events = [
        ledger.JobEventRow(id=number, job_id=1, kind="state", data={}, at_seconds=0.0)
        for number in range(1, 8)
    ]

    async def follow() -> None:
        one = following.FollowingAll(3, None, None, own_scans=False)
        for visible in ((1, 2, 3), (1, 2, 3, 5, 7), (1, 2, 3, 4, 5, 6, 7)):
            found = following.new_events(one, [event for event in events if event.id in visible])
            one.tell(following.News(None, found))
            seen.extend(event.id for event in found)

    asyncio.run(follow())
    assert seen == [5, 7, 4, 6]


def test_throughput_and_log(app: App) -> None:
    """How fast the tasks are since they were begun; what happened, as sentences, the last page first."""
    job_id = submit(app)
    client = app.client("read", roots=["main"])
    assert client.get(f"{JOBS}/{job_id}/throughput").json()["bytes_per_second"] is None
    plan(app, job_id, 3)
    step(app, ledger.complete_task, claim(app).held, {}, time.time())
    shown = client.get(f"{JOBS}/{job_id}/throughput").json()
    assert (shown["done_bytes"], shown["total_bytes"]) == (10, 30)
    assert shown["seconds_left"] == pytest.approx(20 / shown["bytes_per_second"])
    failed = FailureFacts(type="StorageError", detail="it is away", is_retryable=True)
    step(app, ledger.fail, claim(app).held, failed, time.time())
    page = client.get(f"{JOBS}/{job_id}/log?limit=2").json()
    assert [line["text"].split(" s:")[0][:8] for line in page["items"]] == ["running", "again in"]
    assert page["items"][-1]["text"].endswith("StorageError: it is away")
    older = client.get(f"{JOBS}/{job_id}/log?limit=2&cursor={page['next_cursor']}").json()
    assert [line["text"] for line in older["items"]] == ["submitted by test", "planning"]
    assert older["next_cursor"] is None
    stranger = app.client("read", roots=["other"])
    assert [stranger.get(f"{JOBS}/{job_id}/{path}").status_code for path in ("log", "throughput")] == [
        404
    ] * 2


def test_events_are_replayed_behind_the_last_one_seen(app: App) -> None:
    """A connection that was cut is taken up again without a gap and without a repetition."""
    job_id = submit(app)
    plan(app, job_id, 1)
    with listening(app.app) as url:
        key = app.key("read")
        first = watch(url, key, job_id)
        seen = [event["id"] for event in (next(first), next(first), next(first)) if "id" in event]
        first.close()  # type: ignore[attr-defined]
        end(app, job_id)
        seen += [event["id"] for event in watch(url, key, job_id, seen[-1]) if "id" in event]
        every = [event["id"] for event in watch(url, key, job_id) if "id" in event]
        assert seen == every and len(every) == 5
        headers = {"Authorization": f"Bearer {key}", "Last-Event-ID": every[-1]}
        assert httpx.get(f"{url}{JOBS}/{job_id}/events", headers=headers, verify=False).status_code == 204
        for wrong in ("x", "-1", "1.5", str(2**60)):
            given = headers | {"Last-Event-ID": wrong}
            answer = httpx.get(f"{url}{JOBS}/{job_id}/events", headers=given, verify=False)
            assert answer.status_code == 422


def test_a_stream_without_events_has_a_heartbeat(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments keep what lies between awake, and show that the other side lives; what left is forgotten."""
    monkeypatch.setattr(job_events, "HEARTBEAT_SECONDS", 0.05)
    job_id = submit(app)
    with listening(app.app) as url:
        events = watch(url, app.key("read"), job_id)
        comments = 0
        while comments < 4:
            comments += "" in next(events)
        assert app.app.state.job_feeds.open.total() == 1
        events.close()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 60
        while app.app.state.job_feeds.open and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert not app.app.state.job_feeds.open


def test_only_so_many_streams_are_open_at_a_time(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is told to come back later, and nobody else waits for it."""
    monkeypatch.setattr(job_events, "_MAX_STREAMS", 1)
    job_id = submit(app)
    with listening(app.app) as url:
        key = app.key("read")
        events = watch(url, key, job_id)
        next(events)
        headers = {"Authorization": f"Bearer {key}"}
        refused = httpx.get(f"{url}{JOBS}/{job_id}/events", headers=headers, verify=False)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        events.close()  # type: ignore[attr-defined]


def test_one_key_has_only_so_many_streams(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused until one of its own has ended; other keys have theirs."""
    monkeypatch.setattr(job_events, "_MAX_STREAMS_EACH", 2)
    job_id = submit(app)
    with listening(app.app) as url:
        key, other = app.key("read", name="one"), app.key("read", name="other")
        streams = [watch(url, key, job_id) for _ in range(2)] + [watch(url, other, job_id)]
        for stream in streams:
            next(stream)
        headers = {"Authorization": f"Bearer {key}"}
        refused = httpx.get(f"{url}{JOBS}/{job_id}/events", headers=headers, verify=False)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]


def test_streams_end_with_their_key(app: App) -> None:
    """Revoked, a key's streams end within seconds; those of others go on."""
    job_id = submit(app)
    with listening(app.app) as url:
        streams = [watch(url, app.key("read", name=name), job_id) for name in ("one", "other")]
        for stream in streams:
            next(event for event in stream if "id" in event)
        with app.service.database.read() as connection:
            (number,) = [key.id for key in list_keys(connection) if key.name == "one"]
        step(app, revoke_key, number, time.time())
        begun = time.monotonic()
        assert [event for event in streams[0] if "" not in event] == []
        assert time.monotonic() - begun < 60
        plan(app, job_id, 0)
        assert "id" in next(event for event in streams[1] if "" not in event)
        streams[1].close()  # type: ignore[attr-defined]


def test_one_look_at_the_database_serves_all_streams(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many streams cost as many statements as one."""
    monkeypatch.setattr(following, "POLL_SECONDS", 0.1)
    job_ids = [submit(app, params={"n": n}) for n in range(4)]
    statements = []

    @sqlalchemy_event.listens_for(app.service.database.reader, "before_cursor_execute")
    def _(_c: Any, _cursor: Any, statement: str, *_others: Any) -> None:
        statements.append(statement)

    with listening(app.app) as url:
        key = app.key("read")
        streams = [watch(url, key, job_id) for job_id in job_ids for _ in range(3)]
        for stream in streams:
            next(event for event in stream if "id" in event)
        begun = time.monotonic()
        statements.clear()
        while (looks := sum("job_events" in statement for statement in [*statements])) < 3:
            time.sleep(0.01)
        assert looks <= 1 + (time.monotonic() - begun) / following.POLL_SECONDS
        for job_id in job_ids:
            step(app, ledger.request_cancel, job_id, time.time(), "test")
        for stream in streams:
            assert [event["event"] for event in stream if "" not in event][-1] == "end"


def test_streams_end_whole_when_the_server_stops(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens sees an end, not a broken connection, and does not hold up the stop."""
    job_id = submit(app)
    with listening(app.app) as url:
        events = watch(url, app.key("read"), job_id)
        assert "id" in next(event for event in (next(events), next(events)) if "" not in event)
        monkeypatch.setattr(AppStatus, "should_exit", True)  # as the handler of SIGTERM does it
        assert [event for event in events if "" not in event] == []


def test_large_results_are_not_in_lists(app: App) -> None:
    """A list has what is short of them, and says so; the job itself has all, its tasks nothing of it."""
    client = app.client("read")
    large = {"tensors": [{"fqn": f"layers.{n}.weight", "mean": 1.0} for n in range(20_000)], "count": 20_000}
    for result in (large, {"damaged": [], "count": 3}):
        job_id = submit(app)
        plan(app, job_id, 1)
        made = claim(app)
        step(app, ledger.complete_task, made.held, result, time.time())
        made = claim(app)
        assert step(app, ledger.task_results, job_id) == (result,)
        assert step(app, ledger.complete_publish, made.held, result, time.time()).state == "succeeded"
        # What the job has whole is kept once.
        assert step(app, ledger.task_results, job_id) == ({} if result is large else result,)
    listed = client.get(JOBS)
    assert len(listed.content) < 5_000
    small, short = listed.json()["items"]
    assert (small["result"], small["is_result_whole"]) == ({"damaged": [], "count": 3}, True)
    assert (short["result"], short["is_result_whole"]) == ({"count": 20_000}, False)
    whole = client.get(f"{JOBS}/{short['id']}").json()
    assert (whole["result"], whole["is_result_whole"]) == (large, True)
    assert len(client.get(f"{JOBS}/{short['id']}/tasks").content) < 1_000
    assert step(app, forget_jobs, time.time() + 1000) == 1  # all but the newest one
    assert client.get(f"{JOBS}/{short['id']}").status_code == 404


def test_a_list_reads_no_large_result(app: App) -> None:
    """What a page of the list takes does not grow with the results: their rows have nothing of them."""
    job_id = submit(app)
    plan(app, job_id, 0)
    made = claim(app)
    step(app, ledger.complete_publish, made.held, {"text": "x" * 1_000_000}, time.time())
    with app.service.database.read() as connection:
        row = connection.execute(text("SELECT * FROM jobs")).one()
    assert sum(len(str(value)) for value in row) < 5_000
