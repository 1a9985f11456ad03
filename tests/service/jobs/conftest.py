"""Fixtures: catalogs with jobs on local folders and on S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.support.databases import MakeDatabase
from tests.support.job_site import JobSite, running_jobs
from tests.support.s3 import S3Server

STATE: dict[str, Any] = {
    "weight": torch.arange(600.0).reshape(20, 30),
    "bias": torch.ones(7, dtype=torch.bfloat16),
    "step": 5,
}


def check_target(site: JobSite, key: str, result: Any) -> None:
    """Check that the target is in the catalog once, with its origin and structure, and verifies as good."""
    row, source = site.found("export", key), site.id("main", "run/step-5")
    assert (row.state, row.step, row.tensor_count) == ("committed", 5, 2)
    assert (row.bytes, row.file_count) == (result["bytes_written"], result["file_count"])
    assert site.edges(row.id) == [(row.id, source, "converted_from")]
    assert len(site.audited("checkpoint.convert", row.id)) == 1
    assert [one["key"] for one in site.api.checkpoints(root="export")] == [key]
    assert site.result("verify", checkpoint_id=row.id)["outcome"] == "good"


@pytest.fixture
def state() -> dict[str, Any]:
    """Return the state of ``run/step-5``."""
    return STATE


@pytest.fixture
def local(make_database: MakeDatabase, tmp_path: Path) -> Iterator[JobSite]:
    """Start a catalog with ``run/step-5`` in the root "main", beside the empty root "export"."""
    roots = {name: {"url": str(tmp_path / name)} for name in ("main", "export")}
    dcp.save(STATE, checkpoint_id=tmp_path / "main/run/step-5", no_dist=True)
    (tmp_path / "export").mkdir()
    with running_jobs(make_database(), tmp_path, roots) as site:
        site.scan("main")
        yield site


@pytest.fixture
def on_s3(
    make_database: MakeDatabase, tmp_path: Path, s3_server: S3Server, s3_root: str
) -> Iterator[JobSite]:
    """Start the same catalog on S3."""
    options = s3_server.storage_options
    place = f"{s3_root}/main/run/step-5"
    dcp.save(STATE, checkpoint_id=place, storage_options=options, no_dist=True)
    roots = {name: {"url": f"{s3_root}/{name}", "storage_options": options} for name in ("main", "export")}
    with running_jobs(make_database(), tmp_path, roots) as site:
        site.scan("main")
        yield site
