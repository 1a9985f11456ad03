"""Conversions by two processes of a Dask cluster, with the service killed in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors

import dcp
from tests.support.catalog_api import CatalogApi
from tests.support.dask_cluster import dask_cluster
from tests.support.databases import MakeDatabase
from tests.support.fault_plan import HANG
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import raw_s3
from tests.support.service import Service, wait_until

STEPS = (8, 9)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A scheduler, and two workers that are processes of their own."""
    with dask_cluster(threads=1) as made:
        yield made


@pytest.mark.exhaustive  # of the whole; test_executors_dask.py has the parts
@pytest.mark.parametrize("make_database", ["sqlite", "postgresql"], indirect=True)
def test_conversions_on_dask(
    tmp_path: Path, make_database: MakeDatabase, s3_proxy: FaultProxy, s3_root: str, cluster: Any
) -> None:
    """Server and worker killed while both processes write: each job is done once, with one target."""
    state = {"weight": torch.randn(512, 513, generator=torch.Generator().manual_seed(9))}
    for step in STEPS:
        dcp.save(
            {**state, "step": torch.tensor(step)},
            checkpoint_id=f"{s3_root}/runs/step-{step}",
            storage_options=s3_proxy.server.storage_options,
            no_dist=True,
        )
    service = Service(
        tmp_path / "service",
        settings_of(make_database(), cluster.scheduler_address, s3_root, s3_proxy.storage_options),
    )
    with service, service.client() as http:
        api = CatalogApi(http)
        rule = s3_proxy.spoil(HANG, operation="PutObject", key=r"exports/step-./model", times=len(STEPS))
        jobs = {step: convert(api, step) for step in STEPS}
        wait_until(lambda: rule.seen >= len(STEPS), "both tasks write")
        service.kill()
        service.start()
        for step, (source, job) in jobs.items():
            api.finished(job)
            (target,) = api.checkpoints(root="exports", state="any", min_step=step, max_step=step)
            assert (target["key"], target["state"]) == (f"step-{step}", "committed")
            (edge,) = api.get(f"/checkpoints/{target['id']}/lineage")["edges"]
            assert (edge["parent_id"], edge["job_id"]) == (source, job)
    with raw_s3(s3_proxy.server) as s3:
        assert sorted(s3.list(f"{s3_root}/exports")) == [f"step-{step}/model.safetensors" for step in STEPS]
        for step in STEPS:
            found = load_safetensors(s3.read(f"{s3_root}/exports/step-{step}/model.safetensors"))
            assert found["step"] == step
            assert torch.equal(found["weight"], state["weight"])


def settings_of(database_url: str, scheduler: str, root_url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Tasks go to the cluster; leases are soon over."""
    return {
        "database_url": database_url,
        "roots": {
            name: {"url": f"{root_url}/{name}", "storage_options": options, "scan_seconds": 0}
            for name in ("runs", "exports")
        },
        "executor": scheduler.replace("tcp://", "dask://"),
        "concurrency": len(STEPS),
        "lease_seconds": 2,
        "poll_seconds": 0.1,
        "log_level": "warning",
        "rate_limit": "100000/minute",
    }


def convert(api: CatalogApi, step: int) -> tuple[int, int]:
    """The ids of a checkpoint, and of the job that converts it."""
    source = api.register("runs", f"step-{step}")
    place = {"target_root": "exports", "target_key": f"step-{step}"}
    return source, api.submit("convert", checkpoint_id=source, to="safetensors", **place)
