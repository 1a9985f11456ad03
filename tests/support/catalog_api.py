"""The service over plain HTTP, for end-to-end tests: requests, and waiting for results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from tests.support.programs import run_program
from tests.support.service import DcpProcess, ServiceError, wait_until

__all__ = ["CatalogApi", "create_key"]

_JOB_SECONDS = 400.0


def create_key(process: DcpProcess, name: str, scopes: Sequence[str], roots: Sequence[str] = ()) -> str:
    """Create a key by `dcp keys create`, like an operator; ``process`` need not run."""
    given = [part for scope in scopes for part in ("--scope", scope)]
    given += [part for root in roots for part in ("--root", root)]
    command = ("-m", "dcp", "keys", "create", name, *given)
    done = run_program(*command, cwd=process.folder, env=process.environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class CatalogApi:
    """Requests below ``/api/v1``, all of which must succeed."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def get(self, path: str, **query: Any) -> Any:
        """Send a GET; return the JSON."""
        return _json(self.http.get(f"/api/v1{path}", params=query))

    def post(self, path: str, body: Any = None) -> Any:
        """Send a POST; return the JSON of the answer."""
        return _json(self.http.post(f"/api/v1{path}", json=body))

    def checkpoints(self, **query: Any) -> list[dict[str, Any]]:
        """Return all checkpoints of a query, over all pages."""
        found: list[dict[str, Any]] = []
        while True:
            page = self.get("/checkpoints", **query)
            found += page["items"]
            if page["next_cursor"] is None:
                return found
            query["cursor"] = page["next_cursor"]

    def register(self, root: str, key: str) -> int:
        """Have the service read a checkpoint now; return its id."""
        return int(self.post("/checkpoints", {"root": root, "key": key})["id"])

    def submit(self, kind: str, **params: Any) -> int:
        """Submit a job; return its id."""
        return int(self.post("/jobs", {"kind": kind, "params": params})["id"])

    def job(self, job_id: int) -> dict[str, Any]:
        """Return the current state of a job."""
        found: dict[str, Any] = self.get(f"/jobs/{job_id}")
        return found

    def finished(self, job_id: int, seconds: float = _JOB_SECONDS) -> dict[str, Any]:
        """Wait until the job has succeeded and return it; ServiceError if the job fails or takes longer."""

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
