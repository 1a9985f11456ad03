"""Database failures: read-only servers, errors with values, missing and broken files."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from tests.support.app import running_app
from tests.support.catalog import API
from tests.support.databases import MakeDatabase, PostgresServer

RULE = {"name": "hidden-name", "actions": [{"kind": "verify"}]}


def execute(url: str, *statements: str) -> None:
    """Execute statements outside of the service, as an operator does."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[str]:
    """Return the URL of a migrated database."""
    name = postgres_server.create_migrated()
    yield postgres_server.url(name)
    postgres_server.drop(name)


def test_writes_to_a_read_only_server_get_503(postgres: str, tmp_path: Path) -> None:
    """With a read-only server, as after a failover to a replica, writes get 503 and reads work."""
    with running_app(postgres, tmp_path, auth="off") as app:
        name = app.service.database.url.database
        execute(postgres, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        app.service.database.writer.dispose()
        answer = app.base.post(f"{API}/rules", json=RULE)
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert app.base.get(f"{API}/rules").json()["items"] == []


@pytest.mark.each_database
def test_errors_do_not_reveal_values(
    make_database: MakeDatabase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unexpected database error reveals nothing in the response; the log has the cause, without values."""
    url, table = make_database(), "ALTER TABLE automation_rules"
    with running_app(url, tmp_path, auth="off") as app:
        for refusal in (f"{table} ADD CONSTRAINT no CHECK (id < 0)", f"{table} RENAME COLUMN name TO other"):
            if "CONSTRAINT" in refusal and url.startswith("sqlite"):
                continue
            execute(url, refusal)
            answer = app.base.post(f"{API}/rules", json=RULE)
            assert answer.status_code in (409, 500, 503)
            assert answer.json()["request_id"] == answer.headers["x-request-id"]
            assert "automation_rules" not in answer.text
    logged = "".join(capsys.readouterr()) + caplog.text
    assert "automation_rules" in logged and "hidden-name" not in logged


@pytest.mark.parametrize("content", [None, b"no database" * 1000])
def test_a_missing_or_broken_file_gets_503(tmp_path: Path, content: bytes | None) -> None:
    """A missing or broken file gets 503 while metrics still answer; a missing file is created again."""
    url, file = f"sqlite:///{tmp_path / 'a.sqlite'}", tmp_path / "a.sqlite"
    with running_app(url, tmp_path, auth="off") as app:
        assert app.base.get(f"{API}/runs").status_code == 200
        app.service.database.close()
        for path in tmp_path.glob("a.sqlite*"):
            path.unlink()
        if content is not None:
            file.write_bytes(content)
        assert app.base.get(f"{API}/runs").status_code == 503
        metrics: Any = app.base.get("/metrics").text
        assert content is None or ("dcp_database_up 0.0" in metrics and "dcp_api_processes 1.0" in metrics)
        assert content is None or "dcp_catalog_runs " not in metrics
    assert content is not None or sqlite3.connect(file).execute("SELECT 1").fetchall()
