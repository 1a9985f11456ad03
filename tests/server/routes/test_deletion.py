"""Deleting and restoring by requests: scopes, ETags, states, roots, and what the audit log tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.app import App, running_app
from tests.support.catalog_rows import add_checkpoint
from tests.support.databases import MakeDatabase

API = "/api/v1"


@pytest.fixture
def app(make_database: MakeDatabase, tmp_path: Path) -> Iterator[App]:
    """The application with two roots, of which the second is only read."""
    with running_app(
        make_database(),
        tmp_path,
        roots={
            "main": {"url": str(tmp_path / "main")},
            "other": {"url": str(tmp_path / "other"), "readonly": True},
        },
        delete_grace_seconds=1000.0,
    ) as running:
        yield running


@pytest.fixture
def checkpoint(app: App) -> int:
    """One in the first root."""
    return add_checkpoint(app.service.database, "run/step-1")


def audited(admin: TestClient, number: int) -> list[str]:
    """What was done to it."""
    answer = admin.get(f"{API}/audit", params={"target": f"checkpoint:{number}"}).json()
    return [entry["action"] for entry in answer["items"]]


def test_deleted_and_restored(app: App, checkpoint: int) -> None:
    """It says until when it can be restored; both are in the audit log, and both may be said twice."""
    client = app.client("delete", "read")
    first = client.get(f"{API}/checkpoints/{checkpoint}")
    answer = client.delete(f"{API}/checkpoints/{checkpoint}", headers={"If-Match": first.headers["ETag"]})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["state"] == "deleted" and body["purge_after"] is not None
    assert answer.headers["ETag"] != first.headers["ETag"]
    again = client.delete(f"{API}/checkpoints/{checkpoint}")
    assert again.json() == body
    restored = client.post(f"{API}/checkpoints/{checkpoint}/restore")
    assert restored.status_code == 200 and restored.json()["state"] == "committed"
    assert client.post(f"{API}/checkpoints/{checkpoint}/restore").status_code == 409
    told = audited(app.client("admin"), checkpoint)
    assert {"checkpoint.delete", "checkpoint.restore"} <= set(told)


def test_grace_by_request(app: App, checkpoint: int) -> None:
    """Another grace than the configured one may be given."""
    client = app.client("delete")
    body = client.delete(f"{API}/checkpoints/{checkpoint}", params={"grace_seconds": 0}).json()
    assert body["purge_after"] == body["deleted_at"]
    for wrong in ("-1", "nan", "inf", "1e20", "x"):
        answer = client.delete(f"{API}/checkpoints/{checkpoint}", params={"grace_seconds": wrong})
        assert answer.status_code == 422, wrong


def test_conditions_and_scopes(app: App, checkpoint: int) -> None:
    """What changed since is not deleted; nor what is pinned, of a root that is only read, or not there."""
    deleter, writer = app.client("delete"), app.client("write", "read")
    place = f"{API}/checkpoints/{checkpoint}"
    tag = writer.get(place).headers["ETag"]
    assert writer.put(f"{place}/pin").status_code == 200
    assert deleter.delete(place, headers={"If-Match": tag}).status_code == 412
    assert deleter.delete(place).status_code == 409
    assert writer.delete(place).status_code == 403
    assert app.client().delete(place).status_code == 401
    frozen = add_checkpoint(app.service.database, "run/step-2", root="other")
    answer = deleter.delete(f"{API}/checkpoints/{frozen}")
    assert answer.status_code == 403 and "read-only" in answer.json()["detail"]
    stranger = app.client("delete", roots=["other"])
    for act in (stranger.delete(place), stranger.post(f"{place}/restore"), deleter.delete(f"{place}9999")):
        assert act.status_code == 404
    assert writer.get(place).json()["state"] == "committed"
