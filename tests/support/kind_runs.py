"""Jobs of the service's own kinds on a real ledger, with the phases run one by one in this process.

Data between the phases passes through JSON, as between processes. A test may stop after any phase, and run
the phase twice or by two workers at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dcp.server.catalog.runs import sync_roots
from dcp.server.core.jobs.executors.subprocess_main import error_of
from dcp.server.core.jobs.kind import JobContext
from dcp.server.core.jobs.ledger import claims, failures, reading, transitions
from dcp.server.core.jobs.ledger.rows import Claim
from dcp.server.core.roots import Roots
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database
from dcp.server.features import kinds
from dcp.server.features.scan.scanner import scan_root
from dcp.server.records.jobs import Job

__all__ = ["KindRuns"]


class KindRuns:
    """The service without its processes: a catalog over ``settings.roots``, and its jobs."""

    def __init__(self, database: Database, folder: Path, roots: dict[str, Any], **settings: Any) -> None:
        self.database = database
        self.folder = folder
        url = database.url.render_as_string(hide_password=False)
        self.settings = Settings.model_validate({"database_url": url, "roots": roots, **settings})
        self.roots = Roots(self.settings.roots)
        urls = {root.name: root.url for root in self.roots}
        database.transact(lambda connection: sync_roots(connection, urls))
        self._attempts = 0

    # -- the catalog -----------------------------------------------------------------------------------------

    def scan(self, root: str) -> None:
        """Scan a root, to update the catalog."""
        scan_root(self.database, self.roots, root)

    # -- jobs ------------------------------------------------------------------------------------------------

    def job(self, number: int) -> Job:
        """Return a job in its current state."""
        with self.database.read() as connection:
            return reading.get_job(connection, number)

    def drain(self) -> None:
        """Do all pending work."""
        while (made := self.claim()) is not None:
            self.complete(made, self.carry_out(made))

    def claim(self, lease_seconds: float = 3600.0) -> Claim | None:
        """Claim the next work; delays between attempts count as over."""
        now = time.time() + 3600.0  # later than any delay between attempts
        return self.database.transact(lambda connection: claims.claim(connection, "test", now, lease_seconds))

    def carry_out(self, made: Claim, on_progress: Callable[[int], None] = lambda done_bytes: None) -> Any:
        """Run a task like a subprocess: return the result or an exception. ``on_progress`` receives the bytes
        done."""
        kind, job, task = kinds()[made.job.kind], made.job, made.task
        try:
            params = kind.params.model_validate(_json(job.params))
            prepared = {}
            if made.phase == "plan":
                with self.database.read() as connection:
                    prepared = _json(kind.prepare(connection, params))
            with self._context(job, None if task is None else task.number, prepared) as context:
                if made.phase == "plan":
                    plan = kind.plan(context, params)
                    return plan.tasks, _json(dict(plan.plan_data))
                if made.phase == "task":
                    assert task is not None
                    with self.database.read() as connection:
                        payload = reading.payload_of(connection, task)
                    return _json(kind.run_task(context, _json(payload), on_progress))
                if made.phase == "publish":
                    with self.database.read() as connection:
                        results = reading.task_results(connection, job.id)
                        plan_data = reading.plan_of(connection, job.id)
                    return _json(kind.publish(context, _json(plan_data), [_json(one) for one in results]))
                with self.database.read() as connection:
                    plan_data = reading.plan_of(connection, job.id)
                if plan_data is not None:
                    kind.discard(context, _json(plan_data))
                if kind.leaves_plans:
                    kind.clear_plans(context, params)
                return {}
        except Exception as error:  # noqa: BLE001 - part of the result
            return error

    @contextmanager
    def _context(self, job: Job, task_number: int | None, prepared: Any) -> Iterator[JobContext]:
        self._attempts += 1
        folder = self.folder / f"work-{self._attempts}"
        folder.mkdir(parents=True)
        yield JobContext(
            settings=self.settings,
            job_id=job.id,
            task_number=task_number,
            attempt_name=f"{job.id}-{self._attempts}",
            work_folder=folder,
            prepared=prepared,
        )
        assert list(folder.iterdir()) == []
        folder.rmdir()

    def complete(self, made: Claim, answer: Any) -> None:
        """Report the result to the ledger, like a worker."""
        now = time.time()

        def act(connection: Any) -> None:
            if isinstance(answer, Exception):
                error = error_of(answer)
                if not kinds()[made.job.kind].waits:
                    error = replace(error, is_environment=False)
                failures.fail(connection, made.held, error, now)
            elif made.phase == "plan":
                transitions.complete_plan(connection, made.held, answer[1], answer[0], now)
            elif made.phase == "task":
                transitions.complete_task(connection, made.held, answer, now)
            elif made.phase == "publish":
                job = transitions.complete_publish(connection, made.held, answer, now)
                kinds()[job.kind].record(connection, job, answer)
            else:
                transitions.complete_discard(connection, made.held, now)

        self.database.transact(act)


def _json(data: Any) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))
