"""A catalog as users see it: HTTP, checkpoints as files, and a worker that works on demand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi.testclient import TestClient

from tests.support.app import App, running_app
from tests.support.catalog_roots import write_manifest
from tests.support.databases import MakeDatabase
from tests.support.kind_runs import KindRuns

__all__ = ["API", "Catalog", "catalog", "pages"]

API: Final = "/api/v1"


class Catalog:
    """An application over the folders "main" and "other" below ``folder``; the key of `http` has all
    scopes."""

    def __init__(self, app: App, folder: Path) -> None:
        self.app = app
        self.folder = folder
        self.http = app.client("admin", name="boss")
        settings = app.service.settings
        roots = {name: root.model_dump() for name, root in settings.roots.items()}
        self.worker = KindRuns(app.service.database, folder / "work", roots)

    def place(self, key: str, root: str = "main") -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / root / key

    def save(self, key: str, root: str = "main", **facts: Any) -> Path:
        """Write a committed checkpoint with old timestamps; return the path of its commit."""
        return write_manifest(self.place(key, root), **facts)

    def register(self, key: str, root: str = "main", **more: Any) -> int:
        """Register a checkpoint like a trainer; return its id."""
        answer = self.http.post(f"{API}/checkpoints", json={"root": root, "key": key, **more})
        assert answer.is_success, answer.text
        return int(answer.json()["id"])

    def add(
        self, key: str, root: str = "main", metrics: Any = None, tags: tuple[str, ...] = (), **facts: Any
    ) -> int:
        """Save and register a checkpoint; return its id. Its step is the number at the end of its key."""
        facts.setdefault("save_id", f"{abs(hash((root, key))) % (1 << 32):08x}")
        self.save(key, root, **facts)
        return self.register(key, root, metrics=metrics or {}, tags=list(tags))

    def get(self, path: str, client: TestClient | None = None, **query: Any) -> Any:
        """Send a GET that must succeed; return the JSON."""
        answer = (client or self.http).get(f"{API}{path}", params=query)
        assert answer.is_success, (path, query, answer.text)
        return answer.json()

    def status(self, method: str, path: str, client: TestClient | None = None, **options: Any) -> int:
        """Return the status code of a request."""
        return (client or self.http).request(method, f"{API}{path}", **options).status_code

    def rows(self) -> dict[str, Any]:
        """Return the details of all checkpoints in any state, by key."""
        found = pages(self.http, "/checkpoints", state="any", sort="name", limit=500)
        return {one["key"]: self.get(f"/checkpoints/{one['id']}") for one in sorted(found, key=_key)}

    def states(self) -> dict[str, str]:
        """Return the state of each checkpoint, by key."""
        found = pages(self.http, "/checkpoints", state="any", limit=500)
        return {one["key"]: one["state"] for one in sorted(found, key=_key)}

    def do(self, kind: str, **params: Any) -> Any:
        """Submit a job, run it to its end, and return it."""
        answer = self.http.post(f"{API}/jobs", json={"kind": kind, "params": params})
        assert answer.status_code == 202, answer.text
        self.work()
        return self.get(f"/jobs/{answer.json()['id']}")

    def scan(self, root: str = "main", **params: Any) -> Any:
        """Scan a root, which must succeed; return the report."""
        job = self.do("scan", root=root, **params)
        assert job["state"] == "succeeded", job["error"]
        return job["result"]

    def work(self) -> None:
        """Have a worker do all pending work."""
        self.worker.drain()

    def regular_work(self, later_seconds: float = 0.0) -> int:
        """Run the periodic work of a worker at a later time; return the number of submitted jobs."""
        before = len(pages(self.http, "/jobs", limit=500))
        self.app.work(time.time() + later_seconds, "events:automation", "retention", "purges")
        return len(pages(self.http, "/jobs", limit=500)) - before


def _key(one: Any) -> tuple[str, str]:
    return one["root"], one["key"]


def pages(http: TestClient, path: str, **query: Any) -> list[Any]:
    """Return all items of a list, over all pages."""
    found: list[Any] = []
    for _ in range(2000):
        answer = http.get(f"{API}{path}", params=query)
        assert answer.status_code == 200, (path, query, answer.text)
        found += answer.json()["items"]
        if answer.json()["next_cursor"] is None:
            return found
        query["cursor"] = answer.json()["next_cursor"]
    raise AssertionError(f"{path}: the pages do not end")


@pytest.fixture
def catalog(make_database: MakeDatabase, tmp_path: Path) -> Iterator[Catalog]:
    """Provide a catalog with the roots "main" and "other", on SQLite and on PostgreSQL."""
    with running_app(make_database(), tmp_path, rate_limit="1000000/minute") as app:
        yield Catalog(app, tmp_path)
