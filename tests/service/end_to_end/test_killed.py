"""SIGKILL of a worker and of the server during a conversion, which still completes once with one target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors

import dcp
from tests.support.catalog_api import CatalogApi
from tests.support.databases import MakeDatabase
from tests.support.fault_plan import HANG
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import S3Server, raw_s3
from tests.support.service import Service, wait_until

SAVED = "run/step-00000007"
TARGET = "export/step-7"


def save_checkpoint(url: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save a checkpoint of several MiB below ``url``, and return its state."""
    generator = torch.Generator().manual_seed(7)
    state = {f"layer.{number}": torch.randn(512, 513, generator=generator) for number in range(6)}
    state["bias"] = torch.randn(1001, generator=generator).to(torch.bfloat16)
    dcp.save(state, checkpoint_id=f"{url}/{SAVED}", storage_options=options, no_dist=True)
    return state


def settings_of(database_url: str, runs: dict[str, Any], exports: dict[str, Any]) -> dict[str, Any]:
    """Return settings with two roots without periodic scans, and with short leases."""
    return {
        "database_url": database_url,
        "roots": {"runs": {**runs, "scan_seconds": 0}, "exports": {**exports, "scan_seconds": 0}},
        "lease_seconds": 2,
        "poll_seconds": 0.1,
        "log_level": "warning",
        "rate_limit": "100000/minute",
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_worker_killed_then_server_killed(
    tmp_path: Path, make_database: MakeDatabase, s3_proxy: FaultProxy, s3_root: str
) -> None:
    """The server restarts a killed worker; a killed server ends its worker and tasks."""
    options = s3_proxy.storage_options
    state = save_checkpoint(f"{s3_root}/runs", s3_proxy.server.storage_options)
    roots = [{"url": f"{s3_root}/{name}", "storage_options": options} for name in ("runs", "exports")]
    service = Service(tmp_path / "service", settings_of(make_database(), *roots))
    with service, service.client() as http:
        api = CatalogApi(http)
        source = api.register("runs", SAVED)
        operation, key = "PutObject", r"step-7/model\.safetensors"
        rules = [s3_proxy.spoil(HANG, operation=operation, key=key, nth=nth) for nth in (1, 2)]
        job = api.submit(
            "convert", checkpoint_id=source, to="safetensors", target_root="exports", target_key=TARGET
        )
        wait_until(lambda: rules[0].seen >= 1, "the first attempt writes")
        workers = service.pids("worker")
        assert len(workers) == 1
        service.kill_pid(workers[0])
        wait_until(lambda: rules[0].seen >= 2, "the second attempt writes")
        service.kill_parent()
        wait_until(lambda: not service.pids(), "worker and tasks have ended by themselves")
        service.start()
        check_one_target(api, source, api.finished(job))
    check_equal(s3_proxy.server, f"{s3_root}/exports", state)


def check_one_target(api: CatalogApi, source: int, job: dict[str, Any]) -> None:
    """Check that the catalog has a single target with its lineage and a single audit entry."""
    (target,) = api.checkpoints(root="exports", state="any")
    assert (target["key"], target["state"], target["format"]) == (TARGET, "committed", "safetensors")
    assert target["step"] == 7
    (edge,) = api.get(f"/checkpoints/{target['id']}/lineage")["edges"]
    assert (edge["parent_id"], edge["kind"], edge["job_id"]) == (source, "converted_from", job["id"])
    entries = api.get("/audit", action="checkpoint.convert")["items"]
    assert [entry["target"] for entry in entries] == [f"checkpoint:{target['id']}"]
    assert job["error"] is None


def check_equal(server: S3Server, exports_url: str, state: dict[str, torch.Tensor]) -> None:
    """Check that the bucket has the target alone, and that the safetensors library reads the saved state."""
    with raw_s3(server) as s3:
        files = s3.list(exports_url)
        assert list(files) == [f"{TARGET}/model.safetensors"]
        assert s3.uploads(exports_url) == {}
        found = load_safetensors(s3.read(f"{exports_url}/{TARGET}/model.safetensors"))
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(found[name], value), name
