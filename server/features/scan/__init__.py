"""Job ``scan``: updates the catalog from a root or a folder of a root."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, ClassVar, Final

import structlog
from pydantic import Field
from sqlalchemy import Connection

from dcp.server.catalog.inputs import MAX_ID
from dcp.server.catalog.runs import sync_roots
from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import JobContext, JobPlan, Kind, Parameters, ReportProgress
from dcp.server.core.jobs.ledger.rows import JobSpec, Json, TaskSpec
from dcp.server.core.jobs.ledger.transitions import submit
from dcp.server.core.jobs.schedules import PeriodicWork, ScheduleContext
from dcp.server.core.jobs.subjects import open_database, storage_errors
from dcp.server.core.problems import ForbiddenError, NotFoundError
from dcp.server.core.roots import Roots, check_key
from dcp.server.core.security.principal import SYSTEM, Principal
from dcp.server.core.settings import Settings
from dcp.server.features.scan.scanner import scan_root
from dcp.server.records.administration import Scope
from dcp.server.records.jobs import Job

__all__ = ["ScanKind", "ScanParams", "feature", "scans"]


_PRIORITY: Final = 10
"""Scans are short, and other jobs can depend on them."""
_LOGGED: Final = ("new", "changed", "incomplete", "unreadable", "vanished", "lost")
_log = structlog.get_logger(__name__)


class ScanParams(Parameters):
    """Root, and the folder ``below`` to scan; "" for the whole root.

    ``accept_lost``: accept that up to this number of checkpoints is gone, regardless of their share of the
    root. Set after a manual check; needs the scope delete.
    """

    root: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="Name of the root.")
    below: Annotated[str, Field(max_length=1024)] = Field(
        default="", description="Folder of the root to scan; empty: the whole root."
    )
    accept_lost: Annotated[int, Field(ge=0, le=MAX_ID)] = Field(
        default=0,
        description="Accept that up to this many checkpoints are gone, after a manual check; needs the "
        "scope delete.",
    )


class ScanKind(Kind[ScanParams]):
    """Scan by one task, which writes results continuously."""

    name: ClassVar[str] = "scan"
    about: ClassVar[str] = "Bring the catalog up to date with the storage of a root."
    scope: ClassVar[Scope] = "write"
    params = ScanParams
    needs_database: ClassVar[bool] = True
    waits: ClassVar[bool] = False  # the next periodic scan follows soon
    has_own_slot: ClassVar[bool] = True  # long conversions must not delay the discovery of new checkpoints

    @classmethod
    def dedup_key(cls, params: ScanParams) -> str:
        """As `Kind.dedup_key`: one per folder at a time, for all submitters."""
        accepted = f"\0{params.accept_lost}" if params.accept_lost else ""
        place = f"{params.root}/{params.below}{accepted}"
        return f"scan:{hashlib.sha256(place.encode()).hexdigest()[:40]}"

    @classmethod
    def of_folder(cls, root: str, below: str) -> JobSpec:
        """Make the service's scan of a folder after a change by another job."""
        return cls.new_job(ScanParams(root=root, below=below), SYSTEM.name, root=root)

    def specify(
        self, connection: Connection, params: ScanParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        if not caller.may_see(params.root) or params.root not in settings.roots:
            raise NotFoundError(f"root {params.root!r} not found")
        if params.below:
            check_key(params.below)
        if params.accept_lost and not caller.may("delete", params.root):
            raise ForbiddenError("accept_lost needs a key with the scope 'delete'", scope="delete")
        return self.new_job(params, caller.name, root=params.root)

    def plan(self, context: JobContext, params: ScanParams) -> JobPlan:
        """As `Kind.plan`."""
        return JobPlan(tasks=[TaskSpec(payload=params.model_dump(mode="json"))])

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`."""
        with open_database(context) as database, storage_errors(context.roots.get(payload["root"])):
            params = ScanParams.model_validate(payload)
            below, accepted = params.below, params.accept_lost
            return asdict(scan_root(database, context.roots, params.root, below=below, accepted=accepted))

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        return dict(results[0])

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Log the changes, which the task has already written."""
        is_first = result.get("is_first", False)
        changes = {name: result[name] for name in _LOGGED if result.get(name)}
        if is_first or changes:
            _log.info("scanned", root=result["root"], found=result["found"], **changes)
        for line in result["trouble"] if is_first or result.get("lost") else ():
            _log.warning("scan found a problem", root=result["root"], trouble=line)


def scans(settings: Settings) -> Iterable[PeriodicWork]:
    """Make the periodic scans of all roots with an interval."""
    for name, root in sorted(settings.roots.items()):
        if root.scan_seconds > 0:
            yield PeriodicWork(f"scan:{name}", root.scan_seconds, partial(_submit, root=name))


def _submit(context: ScheduleContext, root: str) -> None:
    urls = {found.name: found.url for found in Roots(context.settings.roots)}
    spec = ScanKind.new_job(ScanParams(root=root), SYSTEM.name, root=root, priority=_PRIORITY)

    def act(connection: Connection) -> None:
        sync_roots(connection, urls, now=context.now)
        submit(connection, spec, context.now)

    context.database.transact(act)


feature: Final = Feature("scan", __name__, kinds=[ScanKind()], schedules=[scans])
