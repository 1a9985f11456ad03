"""The service over plain HTTP, for tests of the whole: what they ask for, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from tests.support.programs import run_program
from tests.support.service import DcpProcess, ServiceError, wait_until

__all__ = ["CatalogApi", "create_key"]

_JOB_SECONDS = 400.0


def create_key(process: DcpProcess, name: str, scopes: Sequence[str], roots: Sequence[str] = ()) -> str:
    """A key, made by `dcp keys create` as an operator does it; ``process`` need not run."""
    given = [part for scope in scopes for part in ("--scope", scope)]
    given += [part for root in roots for part in ("--root", root)]
    command = ("-m", "dcp", "keys", "create", name, *given)
    done = run_program(*command, cwd=process.folder, env=process.environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class CatalogApi:
    """Requests below ``/api/v1``, each of which has to succeed."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of a GET."""
        return _json(self.http.get(f"/api/v1{path}", params=query))

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON that answers a POST."""
        return _json(self.http.post(f"/api/v1{path}", json=body))

    def checkpoints(self, **query: Any) -> list[dict[str, Any]]:
        """All checkpoints of a query, over all pages."""
        found: list[dict[str, Any]] = []
        while True:
            page = self.get("/checkpoints", **query)
            found += page["items"]
            if page["next_cursor"] is None:
                return found
            query["cursor"] = page["next_cursor"]

    def register(self, root: str, key: str) -> int:
        """Have the service look at a checkpoint now; its id."""
        return int(self.post("/checkpoints", {"root": root, "key": key})["id"])

    def submit(self, kind: str, **params: Any) -> int:
        """A new job; its id."""
        return int(self.post("/jobs", {"kind": kind, "params": params})["id"])

    def job(self, job_id: int) -> dict[str, Any]:
        """As it is now."""
        found: dict[str, Any] = self.get(f"/jobs/{job_id}")
        return found

    def finished(self, job_id: int, seconds: float = _JOB_SECONDS) -> dict[str, Any]:
        """The job once it has succeeded; ServiceError if it ends otherwise, or not in time."""

        def look() -> dict[str, Any] | None:
            job = self.job(job_id)
            if job["state"] in ("failed", "cancelled"):
                raise ServiceError(f"job {job_id}: {job}")
            return job if job["state"] == "succeeded" else None

        return wait_until(look, f"job {job_id} succeeds", seconds) or {}


def _json(answer: httpx.Response) -> Any:
    assert answer.is_success, (
        f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}"
    )
    return answer.json() if answer.content else None
