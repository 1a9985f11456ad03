"""Metrics. Internal: state of the queue is written straight into tables.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import insert, text

from dcp.server.automation.schedules import built_in_schedules
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import (
    checkpoints,
    consumers,
    deliveries,
    events,
    jobs,
    roots,
    runs,
    schedules,
    tasks,
    verifications,
    webhooks,
)
from dcp.server.monitoring import Monitoring, install
from dcp.server.monitoring.processes import FOLDER_VARIABLE, living_processes, shared_folder
from dcp.server.monitoring.state import REGULAR_SCHEDULE
from dcp.server.settings import Settings
from tests.support.app import running_app

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(body: str) -> Samples:
    """All of the text, by name and labels; parsed as Prometheus does, so that malformed text fails."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float | None:
    """One sample."""
    return found.get((name, tuple(sorted(labels.items()))))


def read(monitoring: Monitoring) -> Samples:
    """Of now."""
    return samples(monitoring.text({"prod": True}).decode())


@pytest.fixture
def watched(database: Database) -> Iterator[tuple[FastAPI, TestClient]]:
    """An application with a few routes, on each database."""
    app = FastAPI()
    install(app, database)

    @app.get("/things/{number}")
    def get_thing(number: int) -> dict[str, int]:
        with database.read() as connection:
            connection.execute(text("SELECT 1"))
        return {"number": number}

    @app.get("/broken")
    def get_broken() -> None:
        raise RuntimeError("on purpose")

    @app.get("/cut")
    def get_cut() -> StreamingResponse:
        def body() -> Iterator[bytes]:
            yield b"x" * 1000
            raise OSError("damaged")

        return StreamingResponse(body())

    yield app, TestClient(app, raise_server_exceptions=False)


def test_requests_are_counted_by_route_not_by_path(watched: tuple[FastAPI, TestClient]) -> None:
    """However many paths and methods there are, the series are few; bytes, failures and cut answers, too."""
    app, client = watched
    for number in range(3):
        assert client.get(f"/things/{number}").status_code == 200
    client.get("/things/none")
    for number in range(5):
        client.get(f"/nowhere/{number}")
        client.request(f"METHOD{number}", "/nowhere")
    assert client.get("/broken").status_code == 500
    with pytest.raises((OSError, ExceptionGroup, httpx.HTTPError)):
        TestClient(app).get("/cut")
    found = read(app.state.monitoring)
    name = "dcp_http_requests_total"
    thing = "/things/{number}"
    assert value(found, name, method="GET", route=thing, status="200") == 3
    assert value(found, name, method="GET", route=thing, status="422") == 1
    assert value(found, name, method="GET", route="(none)", status="404") == 5
    assert value(found, name, method="(other)", route="(none)", status="404") == 5
    assert value(found, name, method="GET", route="/broken", status="500") == 1
    assert value(found, "dcp_http_request_seconds_count", method="GET", route=thing) == 4
    assert (value(found, "dcp_http_response_bytes_total", route=thing) or 0) > 3 * len('{"number":0}')
    assert value(found, "dcp_http_response_bytes_total", route="/cut") == 1000
    assert value(found, "dcp_http_responses_cut_total") == 1
    assert value(found, "dcp_http_requests_in_progress") == 0


def test_statements_are_measured_by_what_they_do(
    watched: tuple[FastAPI, TestClient], database: Database
) -> None:
    """Reads and writes apart."""
    app, client = watched
    before = read(app.state.monitoring)
    client.get("/things/1")
    with database.write() as connection:
        connection.execute(insert(consumers).values(name="one", event_id=1))
    after = read(app.state.monitoring)
    for access in ("read", "write"):
        name = "dcp_database_statement_seconds_count"
        assert (value(after, name, access=access) or 0) > (value(before, name, access=access) or 0)


@pytest.mark.parametrize("url", ["sqlite:////no/such/folder/catalog.sqlite", "postgresql://127.0.0.1:1/none"])
def test_metrics_are_there_while_the_database_is_not(url: str) -> None:
    """The database is said to be down, its failures are counted, and the rest is as ever."""
    app = FastAPI()
    database = Database(url)
    monitoring = install(app, database)
    for _ in range(2):
        with pytest.raises(DatabaseUnavailableError), database.read():
            raise AssertionError
    found = read(monitoring)
    assert value(found, "dcp_database_up") == 0
    assert (value(found, "dcp_database_errors_total") or 0) >= 2
    assert value(found, "dcp_api_processes") == 1
    assert value(found, "dcp_catalog_runs") is None
    database.close()


def fill(database: Database, now: float) -> None:
    """Some of everything that is told of."""
    with database.write() as connection:
        root_id = connection.execute(
            insert(roots)
            .values(
                name="prod", url="/prod", created_seconds=now, scanned_seconds=now - 30, scan_error="denied"
            )
            .returning(roots.c.id)
        ).scalar_one()
        connection.execute(
            insert(roots).values(name="old", url="/", is_configured=False, created_seconds=now)
        )
        times = {"created_seconds": now, "updated_seconds": now}
        run_id = connection.execute(
            insert(runs)
            .values(root_id=root_id, key="a", checkpoint_count=3, bytes=300, latest_seconds=now - 60, **times)
            .returning(runs.c.id)
        ).scalar_one()
        connection.execute(
            insert(runs).values(
                root_id=root_id, key="b", checkpoint_count=2, bytes=50, latest_seconds=1, **times
            )
        )
        for number, state in enumerate(("vanished", "vanished", "unreadable", "committed")):
            connection.execute(
                insert(checkpoints).values(
                    root_id=root_id,
                    run_id=run_id,
                    key=f"a/{number}",
                    name=str(number),
                    format="dcp",
                    state=state,
                    committed_seconds=now,
                    discovered_seconds=now,
                    updated_seconds=now,
                )
            )
        common = {"params": {}, "created_by": "x", "created_seconds": now - 100}
        for kind, state, begun, ended in (
            ("verify", "queued", None, None),
            ("convert", "running", now - 5, None),
            ("convert", "failed", now - 50, now - 40),
            ("convert", "succeeded", now - 50, now - 20),
            ("convert", "succeeded", now - 9000, now - 8000),
        ):
            job_id = connection.execute(
                insert(jobs)
                .values(kind=kind, state=state, started_seconds=begun, finished_seconds=ended, **common)
                .returning(jobs.c.id)
            ).scalar_one()
        for number, state in enumerate(("queued", "queued", "running", "succeeded")):
            connection.execute(insert(tasks).values(job_id=job_id, number=number, state=state, payload={}))
        for outcome, age in (("good", 10), ("damaged", 20), ("damaged", 9999)):
            connection.execute(
                insert(verifications).values(
                    checkpoint_id=1,
                    mode="full",
                    outcome=outcome,
                    findings=[],
                    checked_bytes=1,
                    seconds=1,
                    created_seconds=now - age,
                )
            )
        for _ in range(4):
            connection.execute(insert(events).values(kind="checkpoint.committed", data={}, at_seconds=now))
        connection.execute(insert(consumers).values(name="webhooks", event_id=1))
        hook = {"url": "https://x", "secret": "s", "events": [], **times}
        connection.execute(insert(webhooks).values(**hook))
        connection.execute(insert(webhooks).values(**hook, is_enabled=False))
        for number, state, age in ((1, "waiting", 70), (2, "failed", 500), (3, "delivered", 600)):
            connection.execute(
                insert(deliveries).values(
                    webhook_id=1, event_id=number, state=state, created_seconds=now - age, due_seconds=now
                )
            )
        connection.execute(insert(schedules).values(name="clean-up", due_seconds=now - 33))
        connection.execute(insert(schedules).values(name="webhooks", due_seconds=now - 3333))


def test_the_state_of_the_database_is_told(watched: tuple[FastAPI, TestClient], database: Database) -> None:
    """Catalog, roots, jobs, verifications, webhooks, consumers, schedules: as they were filled in."""
    now = time.time()
    fill(database, now)
    found = read(watched[0].state.monitoring)
    expected = {
        ("dcp_database_up",): 1,
        ("dcp_catalog_checkpoints", "state", "committed"): 5,
        ("dcp_catalog_checkpoints", "state", "vanished"): 2,
        ("dcp_catalog_checkpoints", "state", "unreadable"): 1,
        ("dcp_catalog_checkpoints", "state", "deleted"): 0,
        ("dcp_catalog_runs",): 2,
        ("dcp_root_checkpoints", "root", "prod"): 5,
        ("dcp_root_bytes", "root", "prod"): 350,
        ("dcp_root_newest_timestamp_seconds", "root", "prod"): now - 60,
        ("dcp_root_scanned_timestamp_seconds", "root", "prod"): now - 30,
        ("dcp_root_scan_failed", "root", "prod"): 1,
        ("dcp_jobs", "kind", "verify", "state", "queued"): 1,
        ("dcp_jobs", "kind", "convert", "state", "running"): 1,
        ("dcp_jobs_recent", "kind", "convert", "state", "failed"): 1,
        ("dcp_jobs_recent", "kind", "convert", "state", "succeeded"): 1,
        ("dcp_jobs_recent_seconds", "kind", "convert", "state", "succeeded"): 30,
        ("dcp_tasks", "state", "queued"): 2,
        ("dcp_tasks", "state", "running"): 1,
        ("dcp_verifications_recent", "outcome", "damaged"): 1,
        ("dcp_verifications_recent", "outcome", "good"): 1,
        ("dcp_webhooks", "state", "enabled"): 1,
        ("dcp_webhooks", "state", "disabled"): 1,
        ("dcp_webhook_deliveries", "state", "waiting"): 1,
        ("dcp_webhook_deliveries", "state", "failed"): 1,
        ("dcp_events_behind", "consumer", "webhooks"): 3,
    }
    for (name, *labels), number in expected.items():
        pairs = dict(zip(labels[::2], labels[1::2], strict=True))
        assert value(found, name, **pairs) == pytest.approx(number), (name, pairs)
    assert value(found, "dcp_root_checkpoints", root="old") is None
    for name, least in (
        ("dcp_jobs_oldest_queued_seconds", 100),
        ("dcp_webhook_oldest_waiting_seconds", 70),
        ("dcp_worker_late_seconds", 33),
        ("dcp_database_bytes", 100_000),
        ("dcp_api_resident_bytes", 10 << 20),
    ):
        assert least <= (value(found, name) or 0) < least + (1 << 40), name


def test_what_says_that_no_worker_runs_is_done_by_every_worker() -> None:
    """`dcp_worker_late_seconds` looks at a schedule that is taken every ten minutes in any case."""
    (regular,) = [one for one in built_in_schedules(Settings()) if one.name == REGULAR_SCHEDULE]
    assert regular.interval_seconds <= 600
    assert regular.is_needed is None


def test_many_that_ask_cost_one_reading(watched: tuple[FastAPI, TestClient], database: Database) -> None:
    """What the database says is kept for a few seconds."""
    monitoring = watched[0].state.monitoring
    first = read(monitoring)
    fill(database, time.time())
    second = read(monitoring)
    if value(first, "dcp_database_state_seconds") == value(second, "dcp_database_state_seconds"):
        assert value(second, "dcp_catalog_runs") == 0  # else more than five seconds have passed


def test_metrics_need_a_key_for_all_roots_unless_it_is_said_otherwise(tmp_path: Path) -> None:
    """They name roots and routes: 401 without a key, 403 with one for some roots."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path) as app:
        assert app.client().get("/metrics").status_code == 401
        assert app.client("read", roots=["main"]).get("/metrics").status_code == 403
        answer = app.client("read").get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        assert value(samples(answer.text), "dcp_database_up") == 1
        route = {"method": "GET", "route": "/api/v1/runs/{run_id}", "status": "404"}
        assert app.client("admin").get("/api/v1/runs/77").status_code == 404
        found = samples(app.client("write", "read").get("/metrics").text)
        assert value(found, "dcp_http_requests_total", **route) == 1
    with running_app(url, tmp_path, metrics_need_key=False) as app:
        assert app.client().get("/metrics").status_code == 200


def test_a_folder_for_several_processes_is_named_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the environment inside, and gone with its files outside; one that is named is left alone."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with shared_folder() as folder:
        assert os.environ[FOLDER_VARIABLE] == str(folder)
        (folder / "counter_1.db").write_bytes(b"")
        (folder / "gauge_livesum_999999999.db").write_bytes(b"")
        assert living_processes(folder) == {1, os.getpid()}
    assert not folder.exists()
    assert FOLDER_VARIABLE not in os.environ


def test_counting_costs_little_to_import() -> None:
    """Monitoring pulls in neither torch nor what only workers need."""
    program = (
        "import sys, dcp.server.monitoring, dcp.server.webhooks\n"
        "assert not {'torch', 'numpy', 'distributed', 'fsspec'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
