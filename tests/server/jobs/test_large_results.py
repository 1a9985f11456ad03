"""Large results: others write while one is recorded, and it is kept once however many tell of it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import event, func, select

import dcp
from dcp.server.database import documents
from dcp.server.database.engine import Database
from dcp.server.database.tables import document_parts, jobs, statistics, tasks
from dcp.server.database.tables import documents as documents_table
from dcp.server.jobs.ledger import get_job, job_events_after
from dcp.server.jobs.worker import DEFAULT_KINDS
from tests.support.job_workers import job_settings, wait_for_end, working
from tests.support.kind_runs import KindRuns
from tests.support.written import written_by

TENSORS = 1_000
LEASE_SECONDS = 3.0


def test_a_large_result_is_recorded_in_short_transactions(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the task, the job and the checkpoint's statistics: one document, written once; and on a slow disk
    that lasts longer than a lease, which is kept."""
    monkeypatch.setattr(documents, "_TRANSACTION_CHARACTERS", 10_000)
    roots = {"main": {"url": str(tmp_path / "main"), "scan_seconds": 0}}
    state = {f"layers.{n:04}": torch.full((2,), float(n)) for n in range(TENSORS)}
    dcp.save(state, checkpoint_id=tmp_path / "main" / "run" / "step-1", no_dist=True)
    runs = KindRuns(database, tmp_path / "runs", roots)
    runs.scan("main")
    job_id = runs.submit("stats", checkpoint_id=runs.id("main", "run/step-1"))

    def slow(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("INSERT INTO document_parts"):
            time.sleep(1.5 * LEASE_SECONDS * 100 / TENSORS)

    settings = job_settings(database, tmp_path, lease_seconds=LEASE_SECONDS, roots=roots)
    with ExitStack() as stack:
        both = [
            stack.enter_context(working(settings, kinds=DEFAULT_KINDS, own_executor=True)) for _ in range(2)
        ]
        found = [stack.enter_context(written_by(worker._database)) for worker in both]
        for worker in both:
            event.listen(worker._database.writer, "before_cursor_execute", slow)
        assert wait_for_end(database, job_id).state == "succeeded"
    with database.read() as connection:
        job = get_job(connection, job_id)
        kinds = {one.kind for one in job_events_after(connection, job_id)}
        numbers = [connection.execute(select(t.c.document_id)).scalars().all() for t in (jobs, statistics)]
        of_tasks = connection.execute(select(tasks.c.document_id, tasks.c.result)).all()
        counts = [
            connection.execute(select(func.count()).select_from(t)).scalar_one()
            for t in (documents_table, document_parts)
        ]
    assert job.result is not None
    assert len(job.result["tensors"]) == TENSORS
    assert "retry" not in kinds  # no lease was over
    assert numbers[0] == numbers[1] == [job.document_id]
    assert of_tasks == [(None, None)]
    assert counts == [1, TENSORS // 100]
    assert max(one.most for one in found) < 0.2 * len(str(job.result))
