"""Database outages of a running service: a full disk, a lock, a stopped or hanging server; then recovery."""

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
    """Send a request that writes."""
    return client.post(KEYS, json={"name": uuid.uuid4().hex, "scopes": ["read"]})


def names(client: httpx.Client) -> list[str]:
    """Return the names of all keys written."""
    return [key["name"] for key in client.get(KEYS).json()["items"]]


def check_unavailable(answer: httpx.Response) -> None:
    """Check for a 503 problem document with Retry-After that does not reveal the kind of database."""
    assert answer.status_code == 503, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert int(answer.headers["retry-after"]) > 0
    problem = answer.json()
    assert problem["status"] == 503
    assert problem["type"] == "/problems/unavailable"
    assert "sqlite" not in answer.text
    assert "postgres" not in answer.text


def check_red(service: Service) -> None:
    """Check that the service is alive, but not ready because of the database."""
    checks: dict[str, Any] = service.wait_for("/readyz", 503).json()["checks"]
    assert checks.pop("database") != "ok"
    assert set(checks.values()) <= {"ok"}
    service.wait_for("/healthz")


def check_recovered(service: Service, client: httpx.Client) -> None:
    """Check that the service becomes ready and writes again without intervention."""
    service.wait_for("/readyz")
    wait_until(lambda: write(client).status_code == 201, "a write")


def test_full_disk(tmp_path: Path) -> None:
    """With a full disk writes get 503 and leave nothing partial, reads work, and the service recovers."""
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
    """While another process holds the write lock, writes get 503 in bounded time and reads work."""
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
    """Start a PostgreSQL server for a single test."""
    server = StoppablePostgres()
    with server.program:
        yield server


def test_postgres_is_stopped_and_restarted(tmp_path: Path, own_postgres: StoppablePostgres) -> None:
    """Requests get 503 while PostgreSQL is stopped, and a service started meanwhile waits for the server."""
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


@pytest.mark.exhaustive  # waits for several timeouts
def test_postgres_hangs(tmp_path: Path, own_postgres: StoppablePostgres) -> None:
    """Requests to a hanging PostgreSQL server end in a timeout, with open connections too."""
    settings = {**SETTINGS, "database_url": own_postgres.url(own_postgres.create_migrated())}
    with Service(tmp_path / "service", settings) as service, service.client() as client:
        assert write(client).status_code == 201
        with own_postgres.frozen():
            check_unavailable(client.get(KEYS))
            check_red(service)
        check_recovered(service, client)
