"""A catalog over some roots with an HTTP client, and a worker that runs one phase after the other.

A test may stop the worker after any phase, and run the phase twice or by two workers at once; see `KindRuns`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi.testclient import TestClient

from tests.support.app import App, running_app
from tests.support.catalog_api import CatalogApi
from tests.support.kind_runs import KindRuns

__all__ = ["JobSite", "RefusedError", "flip_bit", "running_jobs"]


class RefusedError(Exception):
    """The service refused a request, with ``status`` and the problem's detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class JobSite:
    """A catalog with a client ``http`` of all scopes; jobs and checkpoints are JSON answers as objects."""

    def __init__(self, app: App, worker: KindRuns) -> None:
        self.app = app
        self.worker = worker
        self.http = app.client("admin", name="operator")
        self.api = CatalogApi(self.http)  # type: ignore[arg-type]  # has the interface of httpx

    def scan(self, *roots: str) -> None:
        """Scan roots, to update the catalog."""
        for root in roots:
            self.worker.scan(root)

    def found(self, root: str, key: str) -> Any:
        """Return a checkpoint in any state; None if absent."""
        for one in self.api.checkpoints(root=root, state="any"):
            if one["key"] == key:
                return SimpleNamespace(**self.api.get(f"/checkpoints/{one['id']}"))
        return None

    def id(self, root: str, key: str) -> int:
        """Return the id of a known checkpoint."""
        return int(self.found(root, key).id)

    def edges(self, number: int) -> list[tuple[int, int, str]]:
        """Return child, parent and kind of each edge of a checkpoint's lineage."""
        edges = self.api.get(f"/checkpoints/{number}/lineage")["edges"]
        return sorted((edge["child_id"], edge["parent_id"], edge["kind"]) for edge in edges)

    def audited(self, action: str, number: int | None = None) -> list[dict[str, Any]]:
        """Return the details of an action in the audit log, for one checkpoint or all."""
        items = self.api.get("/audit", action=action)["items"]
        wanted = [one for one in items if number is None or one["target"] == f"checkpoint:{number}"]
        return [one["detail"] for one in wanted]

    def submit(self, kind: str, http: TestClient | None = None, **params: Any) -> int:
        """Submit a job and return its id; RefusedError if the service refuses the request."""
        answer = (http or self.http).post("/api/v1/jobs", json={"kind": kind, "params": params})
        if not answer.is_success:
            raise RefusedError(answer.status_code, answer.text)
        return int(answer.json()["id"])

    def job(self, number: int) -> Any:
        """Return a job in its current state."""
        return SimpleNamespace(**self.api.job(number))

    def jobs(self, **query: Any) -> list[dict[str, Any]]:
        """Return jobs, newest first."""
        found: list[dict[str, Any]] = self.api.get("/jobs", **query)["items"]
        return found

    def do(self, kind: str, **params: Any) -> Any:
        """Submit a job, have the worker do all pending work, and return the job."""
        number = self.submit(kind, **params)
        self.worker.drain()
        return self.job(number)

    def result(self, kind: str, **params: Any) -> Any:
        """Run a job that must succeed; return its result."""
        job = self.do(kind, **params)
        assert job.state == "succeeded", job.error
        return job.result

    def lose(self, made: Any) -> None:
        """Lose a claim: the worker has done the work, and dies before reporting the result."""
        self.worker.complete(made, ConnectionError("the worker is gone"))

    def next(self, phase: str) -> Any:
        """Claim the next work, which must be in this phase."""
        made = self.worker.claim()
        assert made is not None and made.phase == phase, made
        return made

    def step(self, *phases: str) -> None:
        """Do the next work, which must be in these phases."""
        for phase in phases:
            made = self.next(phase)
            self.worker.complete(made, self.worker.carry_out(made))

    def cancel(self, number: int) -> None:
        """Request the cancellation of a job."""
        self.api.post(f"/jobs/{number}/cancel")


@contextmanager
def running_jobs(
    database_url: str, folder: Path, roots: dict[str, Any] | None = None, **settings: Any
) -> Iterator[JobSite]:
    """Run a catalog over ``roots``, by default the folders "main" and "other"."""
    given = roots or {name: {"url": str(folder / name)} for name in ("main", "other")}
    options = {"roots": given, "rate_limit": "100000/minute", **settings}
    with running_app(database_url, folder, **options) as app:
        given = {name: {**root, "scan_seconds": 0} for name, root in given.items()}
        worker = KindRuns(app.service.database, folder / "work", given, **settings)
        yield JobSite(app, worker)


def flip_bit(folder: Path) -> Path:
    """Flip one bit in the middle of a checkpoint's only data file, and keep the timestamps."""
    (path,) = folder.glob("*.distcp")
    stamp = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    return path
