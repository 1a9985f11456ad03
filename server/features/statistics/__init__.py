"""Statistics of a checkpoint's values, which a job (kind ``stats``) computes in one pass over its bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import Field
from sqlalchemy import Connection, select

from dcp.server.catalog.details import get_checkpoint
from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import CheckpointId, Globs, JobContext, Parameters, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import SimpleKind, Subject, open_place, storage_errors, unchanged
from dcp.server.core.security.principal import Scope
from dcp.server.database.documents import find_item, read_items, write_document
from dcp.server.database.engine import insert_or_update
from dcp.server.database.tables import statistics
from dcp.server.records.declaring import moment
from dcp.server.records.jobs import Job
from dcp.storage.formats.opening import index_at

if TYPE_CHECKING:
    from dcp.inspection.values.statistics import CheckpointStatistics, ElementStatistics


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
    """Return the number as JSON can hold it: None where it is not finite."""
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else float(value)
    return value if value is not None and math.isfinite(value) else None


def statistics_json(found: ElementStatistics | None, *, histogram: bool) -> dict[str, Any] | None:
    """Return the statistics of one tensor as JSON; ``histogram``: include it."""
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
    """Return the ``tensors`` in their order, and the ``total``; numbers that are not finite are null."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRow:
    """Statistics of a checkpoint's values; of content that has been replaced since if ``is_stale``.

    ``result`` is what is of all of its ``tensor_count`` tensors together.
    """

    checkpoint_id: int
    fingerprint: str
    result: Any
    tensor_count: int
    created_seconds: float
    job_id: int | None
    is_stale: bool


def set_statistics(
    connection: Connection,
    checkpoint_id: int,
    *,
    fingerprint: str,
    result: Any,
    job_id: int | None = None,
    document_id: int | None = None,
) -> None:
    """Keep statistics, in place of earlier ones. ``result`` is JSON, with the list ``tensors``, which the
    document has already if it is given."""
    tensors = result.get("tensors", [])
    kept = {name: value for name, value in result.items() if name != "tensors"}
    row = {
        "checkpoint_id": checkpoint_id,
        "fingerprint": fingerprint,
        "result": kept | {"tensor_count": len(tensors)},
        "created_seconds": time.time(),
        "job_id": job_id,
        "document_id": write_document(connection, {"tensors": tensors})
        if document_id is None
        else document_id,
    }
    insert_or_update(connection, statistics, [row])


def stored_statistics(
    connection: Connection, checkpoint_id: int, visible: frozenset[str] | None = None
) -> StatisticsRow | None:
    """Return the stored statistics, None without any; `MissingError` for a checkpoint that may not be
    seen."""
    detail = get_checkpoint(connection, checkpoint_id, visible)
    row = connection.execute(select(statistics).where(statistics.c.checkpoint_id == checkpoint_id)).first()
    if row is None:
        return None
    is_stale = row.fingerprint != detail.fingerprint
    if detail.fingerprint is None:  # not known yet
        is_stale = moment(row.created_seconds) < detail.committed_at
    kept = {name: value for name, value in row.result.items() if name != "tensor_count"}
    return StatisticsRow(
        checkpoint_id=checkpoint_id,
        fingerprint=row.fingerprint,
        result=kept,
        tensor_count=row.result["tensor_count"],
        created_seconds=row.created_seconds,
        job_id=row.job_id,
        is_stale=is_stale,
    )


def statistics_tensors(connection: Connection, checkpoint_id: int, begin: int, end: int) -> list[Any]:
    """Return the statistics of the tensors ``begin`` to ``end`` of a checkpoint that may be seen."""
    query = select(statistics.c.document_id).where(statistics.c.checkpoint_id == checkpoint_id)
    return read_items(connection, connection.execute(query).scalar_one(), "tensors", begin, end)


def statistics_of_tensor(connection: Connection, checkpoint_id: int, fqn: str) -> Any | None:
    """Return the statistics of one tensor of a checkpoint that may be seen; None if there are none of it."""
    query = select(statistics.c.document_id).where(statistics.c.checkpoint_id == checkpoint_id)
    number = connection.execute(query).scalar()
    if number is None:
        return None
    return find_item(connection, number, "tensors", "fqn", fqn)


feature: Final = Feature("statistics", __name__, kinds=[StatsKind()], web=["kept"])
