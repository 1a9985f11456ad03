"""Path from training to a downloaded model, with real processes, HTTP and S3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_safetensors

from dcp.server.client import Client
from tests.support.catalog_api import CatalogApi, create_key
from tests.support.databases import MakeDatabase
from tests.support.fault_plan import HANG
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import raw_s3
from tests.support.service import Service, Worker, wait_until
from tests.support.torchrun import torchrun

STEPS = 4
"""Training steps, of which the even steps are saved."""

MOMENTS = {
    "written": ("PutObject", r"step-00000004/\.tmp-convert"),
    "published": ("GetObject", r"exports/.*step-00000004/model\.safetensors"),
}
"""Moments of the kill, as the S3 request that then gets no response."""


def settings_of(database_url: str, root_url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return settings with keys, two roots without periodic scans, and short leases."""
    roots = {
        name: {"url": f"{root_url}/{name}", "storage_options": options, "scan_seconds": 0}
        for name in ("runs", "exports")
    }
    return {
        "auth": "keys",
        "database_url": database_url,
        "embedded_worker": False,
        "roots": roots,
        "lease_seconds": 2,
        "poll_seconds": 0.1,
        "log_level": "warning",
        "rate_limit": "100000/minute",
    }


def train(service: Service, key: str, checkpoints: str, environment: dict[str, str], results: Path) -> None:
    """Run a training job of two ranks that registers its checkpoints."""
    results.mkdir()
    arguments = ["--checkpoints", checkpoints, "--catalog", service.url, "--catalog-root", "runs"]
    arguments += ["--catalog-folder", "llama", "--results", str(results), "--steps", str(STEPS)]
    torchrun(
        "tests.support.catalog_job", arguments, ranks=2, environment={**environment, "DCP_CATALOG_KEY": key}
    )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("make_database", "moment"),
    [pytest.param("sqlite", "written", marks=pytest.mark.exhaustive), ("postgresql", "published")],
    indirect=["make_database"],
)
def test_from_training_to_download(
    moment: str, tmp_path: Path, make_database: MakeDatabase, s3_proxy: FaultProxy, s3_root: str
) -> None:
    """torchrun saves to S3 asynchronously and registers; a rule converts; downloads have the trained model.
    All processes of the service are killed during a conversion, which completes once with one target."""
    service = Service(tmp_path / "service", settings_of(make_database(), s3_root, s3_proxy.storage_options))
    service.folder.mkdir()
    worker = Worker(service.folder, service.settings)
    admin = create_key(service, "operator", ["admin"])
    trainer = create_key(service, "trainer", ["write"], ["runs"])
    reader = create_key(service, "reader", ["read"])
    with service, worker, service.client(admin) as http:
        api = CatalogApi(http)
        add_rule(api)
        rule = s3_proxy.spoil(HANG, operation=MOMENTS[moment][0], key=MOMENTS[moment][1])
        environment = s3_proxy.server.environment
        train(service, trainer, f"{s3_root}/runs/llama", environment, tmp_path / "results")
        saved = api.checkpoints(root="runs", sort="step")
        assert [(one["key"], one["step"]) for one in saved] == [
            (f"llama/step-{step:08d}", step) for step in (2, 4)
        ]
        assert all("loss" in one["metrics"] for one in saved)

        wait_until(lambda: rule.seen, f"{rule.operation} of {rule.key}")
        for process in (service, worker):
            process.kill()
        for process in (service, worker):
            process.start()
        wait_until(lambda: len(api.checkpoints(root="exports")) == 2, "both are converted")
        wait_until(
            lambda: {job["state"] for job in api.get("/jobs", kind="convert")["items"]} == {"succeeded"},
            "the jobs have succeeded",
        )
        check_once(api, saved)

        with Client(service.url, key=reader) as client:
            for step in (2, 4):
                expected = torch.load(tmp_path / "results" / f"model-{step}.pt", weights_only=True)
                check_downloads(client, step, expected, tmp_path / f"downloads-{step}")
    with raw_s3(s3_proxy.server) as s3:
        names = {f"llama/step-{step:08d}/model.safetensors" for step in (2, 4)}
        assert s3.list(f"{s3_root}/exports").keys() == names
    for secret in (admin, trainer, reader, s3_proxy.server.secret_key):
        assert secret not in service.log() + worker.log()


def add_rule(api: CatalogApi) -> None:
    """Add a rule that converts commits in the root of the runs to safetensors in the root of the exports."""
    place = {"target_root": "exports", "target_key": "{run}/{name}"}
    action = {"kind": "convert", "to": "safetensors", **place}
    api.post(
        "/rules",
        {
            "name": "export",
            "event": "checkpoint.committed",
            "condition": {"root": "runs"},
            "actions": [action],
        },
    )


def check_once(api: CatalogApi, saved: list[dict[str, Any]]) -> None:
    """Check that each checkpoint has a single job, target, lineage edge and audit entry."""
    jobs = api.get("/jobs", kind="convert")["items"]
    assert sorted(job["checkpoint_id"] for job in jobs) == sorted(one["id"] for one in saved)
    targets = api.checkpoints(root="exports", state="any")
    assert {target["state"] for target in targets} == {"committed"}
    edges = [edge for target in targets for edge in api.get(f"/checkpoints/{target['id']}/lineage")["edges"]]
    assert sorted(edge["parent_id"] for edge in edges) == sorted(one["id"] for one in saved)
    audit = api.get("/audit", action="checkpoint.convert")["items"]
    assert sorted(entry["target"] for entry in audit) == sorted(f"checkpoint:{one['id']}" for one in targets)


def check_downloads(client: Client, step: int, expected: dict[str, torch.Tensor], folder: Path) -> None:
    """Check that the converted file and the downloads in both formats have the model."""
    folder.mkdir()
    (target,) = client.checkpoints(root="exports", min_step=step, max_step=step).all()
    (source,) = client.checkpoints(root="runs", min_step=step, max_step=step).all()
    converted = client.download_file(target.id, "model.safetensors", folder / "converted.safetensors")
    check_model(load_safetensors(converted), expected)
    check_model(load_safetensors(client.download(source.id, folder / "streamed.safetensors")), expected)
    as_torch = client.download(source.id, folder / "streamed.pt", format="torch")
    state = torch.load(as_torch, weights_only=True)
    check_model({f"model.{name}": value for name, value in state["model"].items()}, expected)
    assert state["step"] == step


def check_model(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that values are equal bit for bit, and dtypes equal."""
    assert found.keys() == {f"model.{name}" for name in expected}
    for name, value in expected.items():
        assert found[f"model.{name}"].dtype == value.dtype
        assert torch.equal(found[f"model.{name}"], value), name
