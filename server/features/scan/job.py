"""``scan``: the catalog is brought up to date with a root, or with a folder in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

import structlog
from pydantic import Field
from sqlalchemy import Connection

from dcp.server.core.inputs import MAX_ID
from dcp.server.core.jobs.kind import JobContext, JobPlan, Kind, ReportProgress, TaskSpec
from dcp.server.core.jobs.ledger.states import JobRow, JobSpec, Json
from dcp.server.core.jobs.parameters import Parameters
from dcp.server.core.jobs.subjects import open_database, storage_errors
from dcp.server.core.problems import ForbiddenError, NotFoundError
from dcp.server.core.roots import check_key
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings
from dcp.server.features.scan.asking import scan_spec
from dcp.server.features.scan.scanner import Scanner

__all__ = ["ScanKind", "ScanParams"]

_TOLD: Final = ("new", "changed", "incomplete", "unreadable", "vanished", "lost")
_log = structlog.get_logger(__name__)


class ScanParams(Parameters):
    """The root, and the folder ``below`` which is looked through; "" is all of it.

    ``accept_lost``: up to so many checkpoints that are not found are gone, however large a part of the root
    they are; somebody has looked. That needs the scope delete.
    """

    root: Annotated[str, Field(min_length=1, max_length=63)]
    below: Annotated[str, Field(max_length=1024)] = ""
    accept_lost: Annotated[int, Field(ge=0, le=MAX_ID)] = 0


class ScanKind(Kind[ScanParams]):
    """One task, which writes what it finds as it goes."""

    name: ClassVar[str] = "scan"
    scope: ClassVar[Scope] = "write"
    params = ScanParams
    needs_database: ClassVar[bool] = True
    waits: ClassVar[bool] = False  # the next one is asked for soon
    has_own_slot: ClassVar[bool] = True  # what is converted for hours must not keep others from being found

    def specify(
        self, connection: Connection, params: ScanParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        if not caller.may_see(params.root) or params.root not in settings.roots:
            raise NotFoundError(f"there is no root {params.root!r}")
        if params.below:
            check_key(params.below)
        if params.accept_lost and not caller.may("delete"):
            raise ForbiddenError("accept_lost needs a key with the scope 'delete'", scope="delete")
        return scan_spec(params.root, params.below, created_by=caller.name, accept_lost=params.accept_lost)

    def plan(self, context: JobContext, params: ScanParams) -> JobPlan:
        """As `Kind.plan`."""
        return JobPlan(tasks=[TaskSpec(payload=params.model_dump(mode="json"))])

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`."""
        with open_database(context) as database, storage_errors(context.roots.get(payload["root"])):
            scanner = Scanner(database, context.roots)
            accepted = payload.get("accept_lost", 0)  # planned by a version before it, perhaps
            return scanner.scan(payload["root"], below=payload["below"], accepted=accepted).document()

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        return dict(results[0])

    def record(self, connection: Connection, job: JobRow, result: Json) -> None:
        """Nothing is left to write; the log tells of what was found for the first time."""
        is_first = result.get("is_first", False)
        told = {name: result[name] for name in _TOLD if result.get(name)}
        if is_first or told:
            _log.info("scanned", root=result["root"], found=result["found"], **told)
        for line in result["trouble"] if is_first or result.get("lost") else ():
            _log.warning("scanned with trouble", root=result["root"], trouble=line)
