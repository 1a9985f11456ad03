"""The service against its description. Internal: the rows to ask for come without a worker.

Moves to HTTP when the service is rebuilt.

No answer of 5xx, none that is not documented (status, type, schema, headers), nothing accepted that the
description forbids, nothing done without a key. Left out is only the check that whatever the schema allows is
accepted: that a name exists and a cursor is one of ours is nothing that a schema can say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sqlalchemy import update

from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from dcp.server.database.tables import api_keys
from dcp.server.security.keys import create_key
from tests.support.databases import PostgresServer
from tests.support.programs import run_program
from tests.support.service import Service

_SECONDS = 1500
_KEY_ID = 1_000_000_007
"""So that whoever tries small numbers does not revoke the key that is used."""

_STREAMS = ("watch_job", "watch_jobs")
"""Are listened to for ten seconds each time: in the exhaustive runs only."""


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A new database."""
    return f"sqlite:///{tmp_path / 'catalog.sqlite'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def any_url(request: pytest.FixtureRequest, sqlite_url: str) -> Iterator[str]:
    """A new database, once of each kind."""
    if request.param == "sqlite":
        yield sqlite_url
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = server.create()
    yield server.url(name)
    server.drop(name)


def _run(url: str, folder: Path, *arguments: str, with_key: bool) -> None:
    database = Database(url)
    upgrade(database)
    with database.write() as connection:
        _, key = create_key(
            connection, name="fuzz", scopes=["admin"], roots=None, expires_seconds=None, now_seconds=0.0
        )
        connection.execute(update(api_keys).values(id=_KEY_ID))
    database.close()
    (folder / "main" / "run" / "step-1").mkdir(parents=True)
    (folder / "other").mkdir()
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "a.weight": np.ones((4, 4), np.float32),
        "b": np.zeros(3, np.int64),
    }
    save_file(tensors, folder / "main" / "run" / "step-1" / "model.safetensors")
    save_file(tensors, folder / "main" / "model.safetensors")
    settings = {
        "auth": "keys",
        "database_url": url,
        "roots": {name: {"url": str(folder / name), "scan_seconds": 0} for name in ("main", "other")},
        "embedded_worker": False,
        "rate_limit": "1000000/minute",
        "login_limit": "1000000/minute",
    }
    with Service(folder / "service", settings) as service:
        with service.client(key) as client:
            for place in ("run/step-1", "model.safetensors"):
                answer = client.post("/api/v1/checkpoints", json={"root": "main", "key": place})
                assert answer.status_code == 201, answer.text
        headers = ["--header", f"Authorization: Bearer {key}"] if with_key else []
        done = run_program(
            *("-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("run", f"{service.url}/openapi.json", "--url", service.url),
            *("--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "all"),
            *("--continue-on-failure", "--no-color", "--warnings", "off"),
            *headers,
            *arguments,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            timeout_seconds=_SECONDS,
        )
        assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
        assert "Operations:" in done.stdout
        with service.client(key) as client:
            assert client.get("/readyz").json()["checks"]["database"] == "ok"


def test_with_a_key(sqlite_url: str, tmp_path: Path) -> None:
    """Some requests to each operation, valid and not, and chains of them, with all that a key may do."""
    _run(
        sqlite_url,
        tmp_path,
        *("--phases", "examples,fuzzing,stateful", "--max-examples", "1", "--seed", "1"),
        *(part for name in _STREAMS for part in ("--exclude-operation-id", name)),
        with_key=True,
    )


@pytest.mark.exhaustive
def test_without_a_key(sqlite_url: str, tmp_path: Path) -> None:
    """The same of somebody whom the service does not know."""
    _run(
        sqlite_url,
        tmp_path,
        *("--phases", "fuzzing", "--max-examples", "1", "--seed", "1"),
        with_key=False,
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("with_key", [True, False], ids=["key", "no_key"])
def test_all_phases(any_url: str, tmp_path: Path, with_key: bool) -> None:
    """Examples, coverage, fuzzing and chains, on both databases; the seed is in the output if it fails."""
    _run(any_url, tmp_path, "--max-examples", "25", with_key=with_key)
