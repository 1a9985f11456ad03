"""Outage of the object store of a running service: 503, waiting jobs, then recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import torch

import dcp
from tests.support.catalog_api import CatalogApi
from tests.support.fault_plan import RESET
from tests.support.fault_proxy import FaultProxy
from tests.support.service import Service, Worker, wait_until

SAVED = "run/step-00000003"
CHECKS = "/api/v1/root-checks"


def check_unavailable(answer: httpx.Response) -> None:
    """Check for a 503 problem document with Retry-After that does not reveal the endpoint."""
    assert answer.status_code == 503, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["type"] == "/problems/unavailable"
    assert "127.0.0.1" not in answer.text


def test_object_store_is_stopped_and_restarted(tmp_path: Path, s3_proxy: FaultProxy, s3_root: str) -> None:
    """Only requests for stored bytes get 503, a job waits, and the service recovers without intervention."""
    state: dict[str, Any] = {"weight": torch.arange(6000.0).reshape(60, 100)}
    direct, options = s3_proxy.server.storage_options, s3_proxy.storage_options
    dcp.save(state, checkpoint_id=f"{s3_root}/{SAVED}", storage_options=direct, no_dist=True)
    settings = {
        "roots": {"bucket": {"url": s3_root, "storage_options": options, "scan_seconds": 0}},
        "embedded_worker": False,
        "poll_seconds": 0.1,
        "lease_seconds": 5,
        "log_level": "warning",
        "rate_limit": "100000/minute",
    }
    service = Service(tmp_path / "service", settings)
    with service, Worker(service.folder, settings), service.client() as http:
        api = CatalogApi(http)
        number = api.register("bucket", SAVED)
        data = f"/api/v1/checkpoints/{number}/tensors/data?name=weight"
        before = http.get(data).content

        s3_proxy.spoil(RESET, times=None)
        check_unavailable(http.get(data))
        check_unavailable(http.post("/api/v1/checkpoints", json={"root": "bucket", "key": SAVED}))
        wait_until(lambda: not http.get(CHECKS).json()["items"][0]["is_ok"], "the root is not well")
        assert http.get("/readyz").status_code == 200
        assert [one["id"] for one in api.checkpoints(root="bucket")] == [number]
        job = api.submit("verify", checkpoint_id=number)
        wait_until(lambda: api.job(job)["started_at"], "the job begins")
        assert not api.job(job)["finished_at"]

        s3_proxy.heal()
        wait_until(lambda: http.get(CHECKS).json()["items"][0]["is_ok"], "the root is well")
        assert http.get(data).content == before
        assert api.finished(job)["result"]
        assert api.checkpoints(root="bucket")[0]["verification"] == "good"
