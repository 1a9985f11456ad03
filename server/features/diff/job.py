"""``diff``: what differs between two checkpoints, of whatever formats, roots and shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from sqlalchemy import Connection

from dcp.server.core.jobs.kind import JobContext, JobPlan, Kind, ReportProgress, TaskSpec
from dcp.server.core.jobs.ledger.states import JobSpec, Json
from dcp.server.core.jobs.parameters import CheckpointId, Globs, Parameters
from dcp.server.core.jobs.subjects import (
    Subject,
    find_subject,
    job_about,
    open_source,
    storage_errors,
)
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings
from dcp.server.features.statistics.documents import difference_document

__all__ = ["DiffKind", "DiffParams"]


class DiffParams(Parameters):
    """``b`` is compared with ``a``, the one before; without ``values`` no payload is read."""

    a: CheckpointId
    b: CheckpointId
    values: bool = True
    only: Globs | None = None
    exclude: Globs | None = None

    @property
    def dedup_key(self) -> str:
        """The key of the job."""
        return f"diff:{self.digest()}"


class DiffKind(Kind[DiffParams]):
    """One task; the result is the job's."""

    name: ClassVar[str] = "diff"
    scope: ClassVar[Scope] = "read"
    params = DiffParams
    preload: ClassVar[tuple[str, ...]] = (
        "dcp.inspection.values.difference",
        "dcp.inspection.values.tensor_reading",
    )

    def specify(
        self, connection: Connection, params: DiffParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        find_subject(connection, params.a, caller.roots)
        second = find_subject(connection, params.b, caller.roots)
        return job_about(second, self.name, params, caller, params.dedup_key)

    def prepare(self, connection: Connection, params: DiffParams) -> Json:
        """As `Kind.prepare`."""
        return {name: find_subject(connection, getattr(params, name)).to_json() for name in ("a", "b")}

    def plan(self, context: JobContext, params: DiffParams) -> JobPlan:
        """As `Kind.plan`."""
        payload = {**context.prepared, "params": params.model_dump(mode="json")}
        weight = context.prepared["a"]["bytes"] + context.prepared["b"]["bytes"]
        return JobPlan(tasks=[TaskSpec(payload=payload, weight_bytes=weight)])

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`."""
        from dcp.inspection.values.difference import diff
        from dcp.inspection.values.tensor_reading import TensorReader

        params = DiffParams.model_validate(payload["params"])
        root_a, a = open_source(context, Subject(**payload["a"]))
        root_b, b = open_source(context, Subject(**payload["b"]))
        with (
            storage_errors(root_a, root_b),
            TensorReader(a.store, a.index, verify="full", name=a.name) as first,
            TensorReader(b.store, b.index, verify="full", name=b.name) as second,
        ):
            found = diff(
                first,
                second,
                values=params.values,
                only=params.only,
                exclude=params.exclude,
                progress=lambda done, total: report_progress(done),
            )
        contents = {name: Subject(**payload[name]).content for name in ("a", "b")}
        return {"a": params.a, "b": params.b, "contents": contents, **difference_document(found)}

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        return dict(results[0])
