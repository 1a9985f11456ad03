"""Statistics of a checkpoint's values (kind ``stats``), computed in one pass over its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import Field
from sqlalchemy import Connection

from dcp.server.catalog.verifications import set_statistics
from dcp.server.core.jobs.kind import CheckpointId, Globs, JobContext, Parameters, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import (
    SimpleKind,
    Subject,
    open_place,
    storage_errors,
    unchanged,
)
from dcp.server.core.security.principal import Scope
from dcp.server.records.jobs import Job
from dcp.storage.formats.opening import index_at

if TYPE_CHECKING:
    from dcp.inspection.values.statistics import CheckpointStatistics, ElementStatistics

__all__ = ["StatsKind", "StatsParams", "finite", "statistics_json"]

_HISTOGRAMS: Final = 512
"""Tensors whose histograms are kept; those of more would be larger than some checkpoints."""


class StatsParams(Parameters):
    """The checkpoint, which tensors of it, and the bins of each histogram at most."""

    checkpoint_id: CheckpointId
    only: Globs | None = None
    exclude: Globs | None = None
    bins: Annotated[int, Field(ge=8, le=256)] = 32


class StatsKind(SimpleKind[StatsParams]):
    """Statistics of one checkpoint; those of all its tensors are kept with it."""

    name: ClassVar[str] = "stats"
    about: ClassVar[str] = "Compute statistics and histograms of the tensors of a checkpoint."
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
        return {**_document(found), "fingerprint": fingerprint}

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """As `Kind.record`."""
        params = StatsParams.model_validate(job.params)
        if params.only is not None or params.exclude is not None:
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


def finite(value: float | int | None) -> float | int | None:
    """The number as JSON can hold it: None where it is not finite."""
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else float(value)
    return value if value is not None and math.isfinite(value) else None


def statistics_json(found: ElementStatistics | None, *, histogram: bool) -> dict[str, Any] | None:
    """The statistics of one tensor as JSON; ``histogram``: include it."""
    if found is None:
        return None
    names = ("count", "nans", "infs", "zeros", "min", "max", "mean", "std", "norm")
    document: dict[str, Any] = {name: finite(getattr(found, name)) for name in names}
    bins = found.histogram if histogram else None
    document["histogram"] = (
        None
        if bins is None
        else {"edges": [finite(edge) for edge in bins.edges], "counts": list(bins.counts)}
    )
    return document


def _document(found: CheckpointStatistics) -> dict[str, Any]:
    """The ``tensors`` in their order, and the ``total``; numbers that are not finite are null."""
    histograms = len(found.tensors) <= _HISTOGRAMS
    return {
        "tensors": [
            {
                "fqn": tensor.fqn,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "statistics": statistics_json(tensor.statistics, histogram=histograms),
            }
            for tensor in found.tensors
        ],
        "total": statistics_json(found.total, histogram=True),
        "bytes_read": found.bytes_read,
    }
