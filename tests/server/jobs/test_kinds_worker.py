"""Rules and jobs with real workers in processes of their own, which are killed again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from sqlalchemy import select

import dcp
from dcp.demo.s3_server import S3Server
from dcp.server.automation.actions import Action, Condition
from dcp.server.automation.rules import NewRule, create_rule
from dcp.server.database.engine import Database
from dcp.server.database.tables import checkpoints, events, jobs, tasks
from dcp.server.records.jobs import FINAL_STATES
from tests.support.forking import forkserver_context
from tests.support.job_workers import HANG_SECONDS, until
from tests.support.kind_runs import KindRuns
from tests.support.s3 import raw_s3
from tests.support.small_parts_worker import serve

_ACTIONS: TypeAdapter[tuple[Action, ...]] = TypeAdapter(tuple[Action, ...])
_STATE = {f"t{number}": torch.full((1 << 18,), float(number)) for number in range(12)}  # 12 MiB


def make(database: Database, tmp_path: Path, roots: dict[str, Any]) -> KindRuns:
    """A catalog with a rule: what is committed is converted into the second root, in shards, and verified."""
    runs = KindRuns(
        database,
        tmp_path / "runs",
        {name: {**root, "scan_seconds": 0} for name, root in roots.items()},
        poll_seconds=0.05,
        lease_seconds=1.0,
        shutdown_seconds=2.0,
        work_folder=tmp_path / "work",
    )
    convert = {"kind": "convert", "to": "safetensors", "target_root": "export", "target_key": "{run}/{name}"}
    actions = _ACTIONS.validate_python([{**convert, "shard_bytes": 1 << 20}, {"kind": "verify"}])
    rule = NewRule(
        name="export",
        is_enabled=True,
        event="checkpoint.committed",
        condition=Condition(root="main"),
        actions=actions,
    )
    database.transact(lambda connection: create_rule(connection, rule, time.time()))
    return runs


def finish_among_deaths(runs: KindRuns) -> int:
    """Workers one after the other, each killed as soon as it has come a step further; how many died."""

    def is_at(state: str, done: int) -> bool:
        rows = runs.all(select(jobs.c.id, jobs.c.state).where(jobs.c.kind == "convert"))
        if not rows or rows[0].state not in (state, "succeeded", "failed"):
            return False
        finished = select(tasks).where(tasks.c.job_id == rows[0].id, tasks.c.state == "succeeded")
        return rows[0].state != state or len(runs.all(finished)) >= done

    def is_over() -> bool:
        rows = runs.all(select(jobs.c.kind, jobs.c.state))
        kinds = {row.kind for row in rows}
        return {"convert", "verify"} <= kinds and all(row.state in FINAL_STATES for row in rows)

    steps: list[Callable[[], bool]] = [
        partial(is_at, "running", 0),
        partial(is_at, "running", 4),
        partial(is_at, "publishing", 0),
        is_over,
    ]
    for number, has_come in enumerate(steps):
        worker = forkserver_context().Process(target=serve, args=(runs.settings,))
        worker.start()
        until(has_come, f"step {number}")
        worker.kill()
        worker.join(HANG_SECONDS)
    return len(steps)


def check(runs: KindRuns) -> None:
    """Each job succeeded once; one target, converted once, from one source."""
    rows = runs.all(select(jobs).where(jobs.c.kind != "scan"))
    assert sorted((row.kind, row.state) for row in rows) == [
        ("convert", "succeeded"),
        ("verify", "succeeded"),
    ]
    found = {row.key: row for row in runs.all(select(checkpoints))}
    assert set(found) == {"run/step-1"} and len(runs.all(select(checkpoints))) == 2
    told = [row.kind for row in runs.all(select(events).order_by(events.c.id))]
    assert told.count("checkpoint.converted") == 1 and told.count("checkpoint.committed") == 2
    assert told.count("checkpoint.verified") == 1
    assert runs.row("main", "run/step-1").verification == "good"


@pytest.mark.exhaustive
def test_killed_again_and_again(database: Database, tmp_path: Path) -> None:
    """A conversion in a dozen shards and a verification, while every worker dies: done once, and whole."""
    (tmp_path / "export").mkdir()
    runs = make(database, tmp_path, {name: {"url": str(tmp_path / name)} for name in ("main", "export")})
    dcp.save(_STATE, checkpoint_id=tmp_path / "main/run/step-1", no_dist=True)
    runs.scan("main")
    assert finish_among_deaths(runs) == 4
    check(runs)
    target = tmp_path / "export/run/step-1"
    loaded = {
        name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert loaded.keys() == _STATE.keys()
    assert all(torch.equal(loaded[name], _STATE[name]) for name in _STATE)
    left = [path.name for path in target.parent.iterdir()]
    assert [name for name in left if not name.startswith(".tmp-convert-")] == ["step-1"]


@pytest.mark.exhaustive
def test_killed_again_and_again_on_s3(
    database: Database, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """The same with objects."""
    options = s3_server.storage_options
    roots = {name: {"url": f"{s3_root}/{name}", "storage_options": options} for name in ("main", "export")}
    runs = make(database, tmp_path, roots)
    dcp.save(_STATE, checkpoint_id=f"{s3_root}/main/run/step-1", storage_options=options, no_dist=True)
    runs.scan("main")
    assert finish_among_deaths(runs) == 4
    check(runs)
    with raw_s3(s3_server) as raw:
        names = raw.list(f"{s3_root}/export/run/step-1")
        assert "model.safetensors.index.json" in names and len(names) == len(_STATE) + 1
        assert not [name for name in names if ".tmp-" in name]
