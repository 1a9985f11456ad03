"""Verifications and statistics over HTTP. Internal: those of replaced contents are rows of SQL.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from sqlalchemy import select

import dcp
from dcp.server.catalog.contents.verifications import add_verification, set_statistics
from dcp.server.database.tables import document_parts, statistics
from tests.support.app import App, running_app
from tests.support.databases import MakeDatabase


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one checkpoint, old enough to be told from another by its files' times."""
    folder = tmp_path_factory.mktemp("findings")
    dcp.save({"a": torch.ones(3), "b": torch.zeros(2)}, checkpoint_id=folder / "main" / "run" / "step-1")
    for path in (folder / "main" / "run" / "step-1").iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return folder


def _known(app: App) -> int:
    answer = app.client("write").post("/api/v1/checkpoints", json={"root": "main", "key": "run/step-1"})
    number: int = answer.json()["id"]
    return number


def _fingerprint(app: App, number: int) -> str | None:
    from dcp.server.catalog.details import get_checkpoint

    with app.service.database.read() as connection:
        return get_checkpoint(connection, number).fingerprint


def test_verifications(make_database: MakeDatabase, saved: Path) -> None:
    """The newest first, each with whether it is of what is there now; asking for one makes one job."""
    with running_app(make_database(), saved) as app:
        number = _known(app)
        url = f"/api/v1/checkpoints/{number}/verifications"
        client = app.client("read", "write")
        assert client.get(url).json() == {"items": []}
        for outcome, fingerprint in (("damaged", "of another content"), ("good", _fingerprint(app, number))):
            with app.service.database.write() as connection:
                add_verification(
                    connection,
                    number,
                    fingerprint=fingerprint,
                    mode="full",
                    outcome=outcome,  # type: ignore[arg-type]
                    findings=[{"kind": "crc", "message": "m"}] if outcome == "damaged" else [],
                    checked_bytes=20,
                    seconds=0.5,
                )
        items = client.get(url).json()["items"]
        assert [(item["outcome"], item["is_current"]) for item in items] == [
            ("good", True),
            ("damaged", False),
        ]
        assert items[1]["findings"][0]["message"] == "m"
        assert len(client.get(url, params={"limit": 1}).json()["items"]) == 1
        first, second = client.post(url), client.post(url)
        assert first.status_code == second.status_code == 202
        assert first.headers["location"] == second.headers["location"]
        job = client.get(first.headers["location"]).json()
        assert (job["kind"], job["state"]) == ("verify", "queued")
        assert app.client("read").post(url).status_code == 403
        assert app.client("read", roots=["other"]).get(url).status_code == 404
        assert app.client("write", roots=["other"]).post(url).status_code == 404


def test_statistics(make_database: MakeDatabase, saved: Path) -> None:
    """None before they are computed, then pages of tensors; stale if the content has changed since."""
    with running_app(make_database(), saved) as app:
        number = _known(app)
        url = f"/api/v1/checkpoints/{number}/statistics"
        client = app.client("read")
        assert client.get(url).status_code == 404
        answer = client.post(url)
        assert answer.status_code == 202
        assert client.get(answer.headers["location"]).json()["kind"] == "stats"
        tensors = [{"fqn": name, "statistics": {"mean": 1.0, "max": None}} for name in "abcde"]
        for fingerprint in ("of another content", _fingerprint(app, number)):
            assert fingerprint is not None
            with app.service.database.write() as connection:
                set_statistics(
                    connection,
                    number,
                    fingerprint=fingerprint,
                    result={"tensors": tensors, "total": {"mean": 0.6}, "bytes_read": 20},
                )
            page = client.get(url, params={"limit": 3}).json()
            assert page["is_stale"] == (fingerprint == "of another content")
        rest = client.get(url, params={"limit": 3, "cursor": page["next_cursor"]}).json()
        assert [one["fqn"] for one in (*page["tensors"], *rest["tensors"])] == list("abcde")
        assert rest["next_cursor"] is None
        assert (page["total"], page["tensor_count"]) == ({"mean": 0.6}, 5)
        assert app.client("read", roots=["other"]).get(url).status_code == 404


def test_a_page_of_statistics_reads_a_page(make_database: MakeDatabase, saved: Path) -> None:
    """Tensors lie in rows of a hundred; each page is of those it has, wherever it begins."""
    with running_app(make_database(), saved) as app:
        number = _known(app)
        tensors = [{"fqn": f"layers.{n}", "statistics": {"mean": float(n)}} for n in range(1_050)]
        for kept in (tensors, tensors[:1_049]):  # the second takes the place of the first
            with app.service.database.write() as connection:
                set_statistics(
                    connection, number, fingerprint="f", result={"tensors": kept, "total": {"mean": 0.6}}
                )
        with app.service.database.read() as connection:
            assert len(str(connection.execute(select(statistics.c.result)).scalar_one())) < 200
            own = document_parts.c.document_id == statistics.c.document_id
            parts = select(document_parts.c.content).join_from(document_parts, statistics, own)
            assert len(connection.execute(parts).scalars().all()) == 11
        client, url = app.client("read"), f"/api/v1/checkpoints/{number}/statistics"
        found: list[object] = []
        cursor = None
        while cursor or not found:
            page = client.get(url, params={"limit": 70} | ({"cursor": cursor} if cursor else {})).json()
            found += page["tensors"]
            cursor = page["next_cursor"]
            assert page["tensor_count"] == 1_049
        assert found == tensors[:1_049]
