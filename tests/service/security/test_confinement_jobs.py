"""Jobs and scans stay inside of the roots. Internal: rows that lie about where they are.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select

import dcp
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from dcp.server.database.tables import checkpoints
from tests.support.kind_runs import KindRuns


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint that no root has; at the end it is as it was."""
    folder = tmp_path / "outside"
    dcp.save({"w": torch.arange(12.0)}, checkpoint_id=folder / "step-9", no_dist=True)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield folder
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture
def runs(tmp_path: Path, outside: Path) -> KindRuns:
    """A root with a checkpoint, and with links to what is outside; what is tested has no queries."""
    root = tmp_path / "main"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=root / "run" / "step-1", no_dist=True)
    for name, target in {"link": outside, "run/step-9": outside / "step-9", "up": Path("..")}.items():
        (root / name).symlink_to(target)
    database = Database(f"sqlite:///{tmp_path / 'catalog.sqlite'}")
    upgrade(database)
    made = KindRuns(database, tmp_path / "work", {"main": {"url": str(root)}})
    made.scan("main")
    return made


def test_a_scan_follows_no_link_out(runs: KindRuns) -> None:
    """Only what lies in the root is in the catalog, also after a scan of a folder behind a link."""
    assert [row.key for row in runs.all(select(checkpoints.c.key))] == ["run/step-1"]
    for below in ("link", "up", "link/step-9", "up/outside"):
        runs.do("scan", root="main", below=below)
    assert [row.key for row in runs.all(select(checkpoints.c.key))] == ["run/step-1"]


@pytest.mark.parametrize(
    ("to", "key"),
    [
        ("dcp", "link/new"),
        ("dcp", "up/new"),
        ("safetensors", "link/new.safetensors"),
        ("torch", "up/outside/new.pt"),
    ],
)
def test_a_conversion_writes_nothing_outside(runs: KindRuns, outside: Path, to: str, key: str) -> None:
    """A target behind a link out of the root fails the job, and leaves nothing there."""
    number = runs.id("main", "run/step-1")
    job = runs.do("convert", checkpoint_id=number, to=to, target_key=key)
    assert job.state == "failed"
    assert str(outside) not in str(job.error)
    assert not list(outside.parent.glob("**/new*"))


def test_a_checkpoint_that_became_a_link(runs: KindRuns, tmp_path: Path, outside: Path) -> None:
    """What was found as a folder and is a link now is neither read nor deleted by any job."""
    number = runs.id("main", "run/step-1")
    shutil.rmtree(tmp_path / "main" / "run" / "step-1")
    (tmp_path / "main" / "run" / "step-1").symlink_to(outside / "step-9")
    jobs: dict[str, dict[str, Any]] = {
        "verify": {"checkpoint_id": number},
        "stats": {"checkpoint_id": number},
        "diff": {"a": number, "b": number},
        "convert": {"checkpoint_id": number, "to": "safetensors", "target_key": "copy.safetensors"},
    }
    for kind, params in jobs.items():
        job = runs.do(kind, **params)
        assert job.state == "failed", kind
        assert str(outside) not in str(job.error), kind
    assert not (tmp_path / "main" / "copy.safetensors").exists()
    runs.do("delete", checkpoint_ids=[number], grace_seconds=0)
    runs.do("purge", checkpoint_id=number, now=True)
    assert (outside / "step-9").is_dir()
