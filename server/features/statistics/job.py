"""``stats``: the values of a checkpoint's tensors, described in one pass over their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from sqlalchemy import Connection

from dcp.server.catalog.verifications import set_statistics
from dcp.server.core.jobs.kind import JobContext, ReportProgress
from dcp.server.core.jobs.ledger.states import JobRow, Json
from dcp.server.core.jobs.parameters import CheckpointId, Globs, Parameters
from dcp.server.core.jobs.simple_kind import SimpleKind
from dcp.server.core.jobs.subjects import (
    Subject,
    open_place,
    storage_errors,
    unchanged,
)
from dcp.server.core.security.principal import Scope
from dcp.server.features.statistics.documents import statistics_document
from dcp.storage.formats.opening import index_at

__all__ = ["StatsKind", "StatsParams"]


class StatsParams(Parameters):
    """The checkpoint, which tensors of it, and the bins of each histogram at most."""

    checkpoint_id: CheckpointId
    only: Globs | None = None
    exclude: Globs | None = None
    bins: Annotated[int, Field(ge=8, le=256)] = 32

    @property
    def is_whole(self) -> bool:
        """Whether it is what is kept with the checkpoint."""
        return self.only is None and self.exclude is None


class StatsKind(SimpleKind[StatsParams]):
    """Statistics of one checkpoint; the result is kept with the checkpoint, if it is of all tensors."""

    name: ClassVar[str] = "stats"
    scope: ClassVar[Scope] = "read"
    params = StatsParams
    preload: ClassVar[tuple[str, ...]] = (
        "dcp.inspection.values.statistics",
        "dcp.inspection.values.tensor_reading",
    )

    def run(
        self,
        context: JobContext,
        params: StatsParams,
        subjects: Sequence[Subject],
        report_progress: ReportProgress,
    ) -> Json:
        """As `SimpleKind.run`."""
        from dcp.inspection.values.statistics import statistics
        from dcp.inspection.values.tensor_reading import TensorReader

        (subject,) = subjects
        root, place = open_place(context, subject)
        with (
            storage_errors(root),
            unchanged(place) as fingerprint,
            TensorReader(place.store, index_at(place), verify="full") as reader,
        ):
            found = statistics(
                reader,
                only=params.only,
                exclude=params.exclude,
                bins=params.bins,
                progress=lambda done, total: report_progress(done),
            )
        return {**statistics_document(found), "fingerprint": fingerprint}

    def record(self, connection: Connection, job: JobRow, result: Json) -> None:
        """As `Kind.record`."""
        params = StatsParams.model_validate(job.params)
        if not params.is_whole:
            return
        kept = {name: value for name, value in result.items() if name != "fingerprint"}
        set_statistics(
            connection,
            params.checkpoint_id,
            fingerprint=result["fingerprint"],
            result=kept,
            job_id=job.id,
            document_id=job.document_id,
        )
