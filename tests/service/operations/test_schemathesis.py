"""Fuzzing of the service against its OpenAPI document.

Checks: no 5xx; only documented statuses, types, schemas and headers; forbidden input refused; no access
without a key. Not checked: that each request valid by the schema succeeds. A schema cannot say that a name
exists or that a cursor was issued by the service.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sqlalchemy import create_engine, text

from tests.support.catalog_api import CatalogApi, create_key
from tests.support.databases import MakeDatabase
from tests.support.programs import run_program
from tests.support.service import Service

_SECONDS = 1500
_KEY_ID = "UPDATE api_keys SET id = 1000000007"
"""Give the key in use a large id, so that a fuzzed small id does not revoke the key."""

_STREAMS = ("watch_job", "watch_jobs", "watch_run")
"""Event streams, each read for ten seconds: in the exhaustive runs only."""


def _run(url: str, folder: Path, *arguments: str, with_key: bool) -> None:
    (folder / "main" / "run" / "step-1").mkdir(parents=True)
    (folder / "other").mkdir()
    tensors: dict[str, Any] = {"a.weight": np.ones((4, 4), np.float32), "b": np.zeros(3, np.int64)}
    for place in ("run/step-1/model.safetensors", "model.safetensors"):
        save_file(tensors, folder / "main" / place)
    settings = {
        "auth": "keys",
        "database_url": url,
        "roots": {name: {"url": str(folder / name), "scan_seconds": 0} for name in ("main", "other")},
        "embedded_worker": False,
        "rate_limit": "1000000/minute",
        "login_limit": "1000000/minute",
    }
    service = Service(folder / "service", settings)
    service.folder.mkdir()
    key, engine = create_key(service, "fuzz", ["admin"]), create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(_KEY_ID))
    engine.dispose()
    with service, service.client(key) as client:
        for place in ("run/step-1", "model.safetensors"):
            CatalogApi(client).register("main", place)
        document = folder / "openapi.json"  # a file: loading from the URL may time out on a busy machine
        document.write_bytes(client.get("/openapi.json").content)
        headers = ["--header", f"Authorization: Bearer {key}"] if with_key else []
        done = run_program(
            *("-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("run", str(document), "--url", service.url),
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
        assert client.get("/readyz").json()["checks"]["database"] == "ok"


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_requests_with_a_key(make_database: MakeDatabase, tmp_path: Path) -> None:
    """A few valid and invalid requests to each operation, and chains, with a key of all scopes."""
    some = ("--phases", "examples,fuzzing,stateful", "--max-examples", "1", "--seed", "1")
    left_out = (part for name in _STREAMS for part in ("--exclude-operation-id", name))
    _run(make_database(), tmp_path, *some, *left_out, with_key=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("with_key", [True, False], ids=["key", "no_key"])
def test_all_phases(make_database: MakeDatabase, tmp_path: Path, with_key: bool) -> None:
    """All phases on both databases, with and without a key; a failure prints the seed."""
    _run(make_database(), tmp_path, "--max-examples", "6", with_key=with_key)
