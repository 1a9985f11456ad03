"""Conversions that are killed while they reserve the space for their target: nothing of it stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcp
from dcp.server.database.engine import Database
from dcp.server.jobs.ledger import fail, request_cancel
from dcp.server.jobs.ledger.states import FailureFacts
from tests.support.forking import forkserver_context
from tests.support.halting_kinds import serve
from tests.support.job_workers import HANG_SECONDS, until, wait_for_end
from tests.support.kind_runs import KindRuns

_STATE = {f"t{number}": torch.full((1 << 18,), float(number)) for number in range(3)}


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> KindRuns:
    """A checkpoint, and a job that is to make three shards of it."""
    (tmp_path / "export").mkdir()
    dcp.save(_STATE, checkpoint_id=tmp_path / "main/run/step-1", no_dist=True)
    roots: dict[str, Any] = {
        name: {"url": str(tmp_path / name), "scan_seconds": 0} for name in ("main", "export")
    }
    made = KindRuns(
        database,
        tmp_path / "runs",
        roots,
        poll_seconds=0.05,
        lease_seconds=1.0,
        shutdown_seconds=1.0,
        work_folder=tmp_path / "work",
    )
    made.scan("main")
    return made


def submit(runs: KindRuns) -> int:
    """The job."""
    return runs.submit(
        "convert",
        checkpoint_id=runs.id("main", "run/step-1"),
        to="safetensors",
        target_root="export",
        target_key="a/x",
        shard_bytes=1 << 20,
    )


@contextmanager
def worker(runs: KindRuns, gate: Path) -> Iterator[Any]:
    """In a process of its own, killed at the end."""
    process = forkserver_context().Process(target=serve, args=(runs.settings, str(gate)))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(HANG_SECONDS)


def kill_while_reserving(runs: KindRuns, tmp_path: Path, gate: Path) -> list[Path]:
    """What a worker has left that was killed so."""
    reached = gate.with_suffix(".reached")
    reached.unlink(missing_ok=True)
    gate.touch()
    with worker(runs, gate):
        until(reached.exists, "the reservation")
    left = list((tmp_path / "export/a").glob(".tmp-convert-*"))
    assert left and any(path.is_file() for path in left[0].rglob("*.safetensors"))
    return left


def test_the_next_attempt_clears_away_what_the_killed_one_reserved(runs: KindRuns, tmp_path: Path) -> None:
    """And the target is alone in its folder in the end."""
    job_id, gate = submit(runs), tmp_path / "gate"
    kill_while_reserving(runs, tmp_path, gate)
    gate.unlink()
    with worker(runs, gate):
        assert wait_for_end(runs.database, job_id).state == "succeeded"
    assert [path.name for path in (tmp_path / "export/a").iterdir()] == ["x"]
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "export/a/x").glob("*.safetensors"):
        found |= load_file(file)
    assert all(torch.equal(found[name], _STATE[name]) for name in _STATE)


def test_a_job_that_is_cancelled_then_leaves_nothing(runs: KindRuns, tmp_path: Path) -> None:
    """It was never planned, and is over only once what its attempt has reserved is gone."""
    job_id, gate = submit(runs), tmp_path / "gate"
    kill_while_reserving(runs, tmp_path, gate)
    after = runs.database.transact(lambda connection: request_cancel(connection, job_id, 1.0, "test"))
    assert after.is_ending
    gate.unlink()
    with worker(runs, gate):
        assert wait_for_end(runs.database, job_id).state == "cancelled"
    assert list((tmp_path / "export/a").iterdir()) == []


def test_a_job_that_is_cancelled_meanwhile_leaves_nothing(runs: KindRuns, tmp_path: Path) -> None:
    """The worker kills what reserves, and clears away behind it; also where the plan was just complete."""
    job_id, gate = submit(runs), tmp_path / "gate"
    gate.touch()
    with worker(runs, gate):
        until(gate.with_suffix(".reached").exists, "the reservation")
        runs.database.transact(lambda connection: request_cancel(connection, job_id, 1.0, "test"))
        assert wait_for_end(runs.database, job_id).state == "cancelled"
    assert list((tmp_path / "export/a").iterdir()) == []


@pytest.mark.parametrize("is_told", [True, False])
def test_a_plan_that_comes_too_late_leaves_nothing(is_told: bool, runs: KindRuns, tmp_path: Path) -> None:
    """It was cancelled while it was planned, and whoever planned it tells that it is done, or dies."""
    job_id = submit(runs)
    made = runs.claim()
    assert made is not None and made.phase == "plan"
    answer = runs.carry_out(made)
    assert list((tmp_path / "export/a").glob(".tmp-convert-*"))
    runs.database.transact(lambda connection: request_cancel(connection, job_id, 1.0, "test"))
    runs.complete(made, answer if is_told else ConnectionError("the worker is gone"))
    runs.drain()
    assert runs.job(job_id).state == "cancelled"
    assert list((tmp_path / "export/a").iterdir()) == []


def test_a_job_that_fails_for_good_leaves_nothing(runs: KindRuns, tmp_path: Path) -> None:
    """Its attempts at the plan have reserved, and all were lost."""
    job_id, lost = submit(runs), FailureFacts(type="WorkerLostError", detail="gone")
    while not runs.job(job_id).is_ending:
        made = runs.claim()
        assert made is not None and made.phase == "plan"
        runs.carry_out(made)
        runs.database.transact(partial(fail, held=made.held, error=lost, now=1.0))
    runs.drain()
    assert runs.job(job_id).state == "failed"
    assert list((tmp_path / "export/a").iterdir()) == []
