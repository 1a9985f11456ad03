"""A running service whose database is full, locked, away or frozen: 503, not ready, then well again."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.outages import StoppablePostgres, limited_files
from tests.support.service import Service, wait_until

KEYS = "/api/v1/keys"
SETTINGS = {"embedded_worker": False, "request_seconds": 6.0}


def write(client: httpx.Client) -> httpx.Response:
    """A request that writes."""
    return client.post(KEYS, json={"name": uuid.uuid4().hex, "scopes": ["read"]})


def names(client: httpx.Client) -> list[str]:
    """What has been written."""
    return [key["name"] for key in client.get(KEYS).json()["items"]]


def check_unavailable(answer: httpx.Response) -> None:
    """A problem document that says to come back, and nothing of the database's whereabouts."""
    assert answer.status_code == 503, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert int(answer.headers["retry-after"]) > 0
    problem = answer.json()
    assert problem["status"] == 503
    assert problem["type"] == "/problems/unavailable"
    assert "sqlite" not in answer.text
    assert "postgres" not in answer.text


def check_red(service: Service) -> None:
    """Not ready, because of the database; yet alive."""
    checks: dict[str, Any] = service.wait_for("/readyz", 503).json()["checks"]
    assert checks.pop("database") != "ok"
    assert set(checks.values()) <= {"ok"}
    service.wait_for("/healthz")


def check_recovered(service: Service, client: httpx.Client) -> None:
    """Ready and writing again, without anybody's doing."""
    service.wait_for("/readyz")
    wait_until(lambda: write(client).status_code == 201, "a write")


def test_full_disk(tmp_path: Path) -> None:
    """Answers 503 to writes, of which nothing is there in part, and reads meanwhile; then all is well."""
    with Service(tmp_path / "service", SETTINGS) as service, service.client() as client:
        log_bytes = (service.folder / "dcp-catalog.sqlite-wal").stat().st_size
        written = []
        with limited_files(service.pid, log_bytes + (64 << 10)):
            for _ in range(2000):
                answer = write(client)
                if answer.status_code != 201:
                    break
                written.append(answer.json()["name"])
            check_unavailable(answer)
            check_red(service)
            check_unavailable(write(client))
            assert names(client) == written
        check_recovered(service, client)
        assert names(client)[:-1] == written


@pytest.mark.exhaustive
def test_locked_database(tmp_path: Path) -> None:
    """Answers 503 in bounded time to writes beside a writer that does not end, and reads meanwhile."""
    with Service(tmp_path / "service", SETTINGS) as service, service.client() as client:
        assert write(client).status_code == 201
        other = sqlite3.connect(service.folder / "dcp-catalog.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            check_unavailable(write(client))
            assert client.get(KEYS).status_code == 200
            check_red(service)
        finally:
            other.rollback()
            other.close()
        check_recovered(service, client)


@pytest.fixture
def own_postgres() -> Iterator[StoppablePostgres]:
    """A PostgreSQL that no other test uses."""
    server = StoppablePostgres()
    with server.program:
        yield server


def test_postgres_goes_away_and_comes_back(tmp_path: Path, own_postgres: StoppablePostgres) -> None:
    """Requests are 503 while it is away; a service that starts meanwhile waits for it."""
    settings = {**SETTINGS, "database_url": own_postgres.url(own_postgres.create_migrated())}
    service = Service(tmp_path / "service", settings, ready=False)
    with service, service.client() as client:
        service.wait_for("/readyz")
        assert write(client).status_code == 201

        own_postgres.program.stop()
        check_unavailable(client.get(KEYS))
        check_unavailable(write(client))
        check_red(service)
        own_postgres.program.start()
        check_recovered(service, client)

        own_postgres.program.stop()
        service.stop()
        service.start()
        check_unavailable(client.get(KEYS))
        check_red(service)
        own_postgres.program.start()
        check_recovered(service, client)
        assert len(names(client)) >= 3


@pytest.mark.exhaustive  # waits for several limits of time
def test_postgres_does_not_answer(tmp_path: Path, own_postgres: StoppablePostgres) -> None:
    """A server that hangs with its connections open is not waited for without end."""
    settings = {**SETTINGS, "database_url": own_postgres.url(own_postgres.create_migrated())}
    with Service(tmp_path / "service", settings) as service, service.client() as client:
        assert write(client).status_code == 201
        with own_postgres.frozen():
            check_unavailable(client.get(KEYS))
            check_red(service)
        check_recovered(service, client)
