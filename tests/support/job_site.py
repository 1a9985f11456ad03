"""A catalog over some roots, asked over HTTP, and a worker of its own that does one phase after the other.

A test may stop the worker after any phase, and have it done twice, or by two at once; see `KindRuns`.
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
    """The service refuses a request: with ``status``, and the problem's detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class JobSite:
    """``http`` may all; jobs and checkpoints are the service's answers, with attributes."""

    def __init__(self, app: App, worker: KindRuns) -> None:
        self.app = app
        self.worker = worker
        self.http = app.client("admin", name="operator")
        self.api = CatalogApi(self.http)  # type: ignore[arg-type]  # which asks as httpx does

    def scan(self, *roots: str) -> None:
        """Bring the catalog up to date."""
        for root in roots:
            self.worker.scan(root)

    def found(self, root: str, key: str) -> Any:
        """A checkpoint in whatever state; None if there is none."""
        for one in self.api.checkpoints(root=root, state="any"):
            if one["key"] == key:
                return SimpleNamespace(**self.api.get(f"/checkpoints/{one['id']}"))
        return None

    def id(self, root: str, key: str) -> int:
        """Of a checkpoint that was found."""
        return int(self.found(root, key).id)

    def edges(self, number: int) -> list[tuple[int, int, str]]:
        """Child, parent and kind of each edge of its lineage."""
        edges = self.api.get(f"/checkpoints/{number}/lineage")["edges"]
        return sorted((edge["child_id"], edge["parent_id"], edge["kind"]) for edge in edges)

    def audited(self, action: str, number: int | None = None) -> list[dict[str, Any]]:
        """Details in the audit log of an action, of one checkpoint or of all."""
        items = self.api.get("/audit", action=action)["items"]
        wanted = [one for one in items if number is None or one["target"] == f"checkpoint:{number}"]
        return [one["detail"] for one in wanted]

    def submit(self, kind: str, http: TestClient | None = None, **params: Any) -> int:
        """The job's id; RefusedError if there is none."""
        answer = (http or self.http).post("/api/v1/jobs", json={"kind": kind, "params": params})
        if not answer.is_success:
            raise RefusedError(answer.status_code, answer.text)
        return int(answer.json()["id"])

    def job(self, number: int) -> Any:
        """As it is now."""
        return SimpleNamespace(**self.api.job(number))

    def jobs(self, **query: Any) -> list[dict[str, Any]]:
        """The newest first."""
        found: list[dict[str, Any]] = self.api.get("/jobs", **query)["items"]
        return found

    def do(self, kind: str, **params: Any) -> Any:
        """The job, once the worker has done all that there was to do."""
        number = self.submit(kind, **params)
        self.worker.drain()
        return self.job(number)

    def result(self, kind: str, **params: Any) -> Any:
        """Of a job that succeeds."""
        job = self.do(kind, **params)
        assert job.state == "succeeded", job.error
        return job.result

    def lose(self, made: Any) -> None:
        """The worker has done it, and dies before anybody knows."""
        self.worker.complete(made, ConnectionError("the worker is gone"))

    def next(self, phase: str) -> Any:
        """The next thing to do, which is this."""
        made = self.worker.claim()
        assert made is not None and made.phase == phase, made
        return made

    def step(self, *phases: str) -> None:
        """Do the next things."""
        for phase in phases:
            made = self.next(phase)
            self.worker.complete(made, self.worker.carry_out(made))

    def cancel(self, number: int) -> None:
        """Ask for it."""
        self.api.post(f"/jobs/{number}/cancel")


@contextmanager
def running_jobs(
    database_url: str, folder: Path, roots: dict[str, Any] | None = None, **settings: Any
) -> Iterator[JobSite]:
    """Over ``roots``, or over the folders "main" and "other"."""
    given = roots or {name: {"url": str(folder / name)} for name in ("main", "other")}
    options = {"roots": given, "rate_limit": "100000/minute", **settings}
    with running_app(database_url, folder, **options) as app:
        given = {name: {**root, "scan_seconds": 0} for name, root in given.items()}
        worker = KindRuns(app.service.database, folder / "work", given, **settings)
        yield JobSite(app, worker)


def flip_bit(folder: Path) -> Path:
    """One bit in the middle of a checkpoint's only data file, which is as old as before."""
    (path,) = folder.glob("*.distcp")
    stamp = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    return path
