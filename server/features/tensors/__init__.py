"""Tensors of a checkpoint, and statistics of their values from a job (kind ``stats``) in one pass.

Marks of dead and exploding tensors follow from the statistics, by rules documented on the pages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field
from sqlalchemy import Connection, select

from dcp.server.catalog.details import get_checkpoint
from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import CheckpointId, Globs, JobContext, Parameters, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import SimpleKind, Subject, read_tensors
from dcp.server.core.security.principal import Scope
from dcp.server.database.documents import read_items, write_document
from dcp.server.database.engine import insert_or_update
from dcp.server.database.tables import statistics
from dcp.server.records.declaring import Hidden, Shown, moment
from dcp.server.records.jobs import Job

if TYPE_CHECKING:
    from dcp.inspection.values.statistics import CheckpointStatistics, ElementStatistics


_HISTOGRAMS: Final = 512
"""Tensors with stored histograms; more would be larger than some checkpoints."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of all tensors together, and of the tensors of this page."""

    is_stale: Annotated[bool, Shown("The checkpoint was replaced since they were computed.")]
    created_at: datetime
    job_id: int | None
    total: Annotated[Any, Shown("Statistics of all tensors together.")]
    tensor_count: int
    tensors: Annotated[tuple[Any, ...], Shown("Statistics of the tensors of this page.")] = ()
    next_cursor: Annotated[
        str | None, Shown("`cursor` of the request for the next page; null: this is the last page.")
    ] = None
    document_id: Annotated[int, Hidden()] = 0  # for individual tensors


@dataclass(frozen=True, slots=True)
class MeasuredTensor:
    """Statistics of a tensor. ``is_kept``: computed by a job at ``computed_at``; False: read for this
    answer."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    statistics: Annotated[Mapping[str, Any] | None, Shown("null: not numeric.")]
    is_kept: Annotated[bool, Shown("true: computed by a job; false: read for this answer.")]
    computed_at: Annotated[datetime | None, Shown("By the job.")] = None


GridValue = Literal["mean", "min", "max", "abs_max", "nonfinite"]


@dataclass(frozen=True, slots=True)
class TensorGrid:
    """Matrix, or a two-dimensional slice, as ``rows`` times ``columns`` cells in row order.

    Cell (i, j) covers rows from ``i * shape[0] // rows`` and columns from ``j * shape[1] // columns``.
    ``nonfinite`` counts NaN and infinity, which other values ignore; a cell without finite values has None.
    """

    fqn: str
    dtype: str
    shape: Annotated[tuple[int, ...], Shown("Of the slice, as a matrix.")]
    rows: Annotated[int, Shown("Number of rows of cells.")]
    columns: Annotated[int, Shown("Number of columns of cells.")]
    is_sampled: Annotated[bool, Shown("Only a part of each cell was read, because the tensor is large.")]
    read_elements: Annotated[int, Shown("Number of elements read.")]
    mean: Annotated[tuple[float | None, ...], Shown("By cell, row by row; null: no finite value.")]
    min: tuple[float | None, ...]
    max: tuple[float | None, ...]
    abs_max: Annotated[tuple[float | None, ...], Shown("By cell: maximum absolute value.")]
    nonfinite: Annotated[tuple[int, ...], Shown("By cell: number of NaN or infinite elements.")]


class StatsParams(Parameters):
    """Checkpoint, selected tensors, and the maximum number of bins of each histogram."""

    checkpoint_id: CheckpointId
    only: Globs | None = Field(default=None, description="Globs of names; default: all.")
    exclude: Globs | None = Field(default=None, description="Globs of names to leave out.")
    bins: Annotated[int, Field(ge=8, le=256)] = Field(
        default=32, description="Maximum number of bins of a histogram."
    )


class StatsKind(SimpleKind[StatsParams]):
    """Statistics of a checkpoint; statistics of all tensors are stored with the checkpoint."""

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

        with read_tensors(context, *subjects) as [(reader, fingerprint)]:
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
        tensors = result.get("tensors", [])
        kept = {name: value for name, value in result.items() if name not in ("fingerprint", "tensors")}
        row = {
            "checkpoint_id": params.checkpoint_id,
            "fingerprint": result["fingerprint"],
            "result": kept | {"tensor_count": len(tensors)},
            "created_seconds": time.time(),
            "job_id": job.id,
            # a large result is already a document, with the list of tensors
            "document_id": job.document_id or write_document(connection, {"tensors": tensors}),
        }
        insert_or_update(connection, statistics, [row])


def finite(value: float | int | None) -> float | int | None:
    """Return the number for JSON; None for NaN and infinity."""
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else float(value)
    return value if value is not None and math.isfinite(value) else None


def statistics_json(found: ElementStatistics | None, *, histogram: bool) -> dict[str, Any] | None:
    """Return the statistics of a tensor as JSON; ``histogram``: include both histograms."""
    if found is None:
        return None
    names = ("count", "nans", "infs", "zeros", "min", "max", "mean", "std", "norm")
    document: dict[str, Any] = {name: finite(getattr(found, name)) for name in names}
    for name in ("histogram", "linear"):
        bins = getattr(found, name) if histogram else None
        document[name] = (
            None
            if bins is None
            else {"edges": [finite(edge) for edge in bins.edges], "counts": list(bins.counts)}
        )
    return document


def _document(found: CheckpointStatistics) -> dict[str, Any]:
    """Return the ``tensors`` in order, and the ``total``; NaN and infinity become null."""
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


def stored_statistics(
    connection: Connection, checkpoint_id: int, visible: frozenset[str] | None = None
) -> Statistics | None:
    """Return the stored statistics without individual tensors; None without statistics. Raises MissingError
    for an invisible checkpoint."""
    detail = get_checkpoint(connection, checkpoint_id, visible)
    row = connection.execute(select(statistics).where(statistics.c.checkpoint_id == checkpoint_id)).first()
    if row is None:
        return None
    created_at = moment(row.created_seconds)
    is_stale = row.fingerprint != detail.fingerprint
    if detail.fingerprint is None:  # not computed yet
        is_stale = created_at < detail.committed_at
    total, count = row.result.get("total"), row.result["tensor_count"]
    return Statistics(is_stale, created_at, row.job_id, total, count, document_id=row.document_id)


def tensors_of(connection: Connection, found: Statistics, begin: int, end: int) -> list[Any]:
    """Return the statistics of the tensors ``begin`` to ``end``."""
    return read_items(connection, found.document_id, "tensors", begin, end)


# -- marks ---------------------------------------------------------------------------------------------------


LARGE: Final = 10_000.0
"""Magnitude above the weights and moments of healthy training."""

Values = Mapping[str, Any]
"""Statistics of a tensor as the API has them."""


@dataclass(frozen=True, slots=True)
class Mark:
    """``kind`` and why."""

    kind: Literal["exploding", "dead"]
    reason: str


def mark_of(dtype: str, values: Values | None, second_moment: Values | None = None) -> Mark | None:
    """Return the mark of a floating-point tensor with several elements. "exploding": NaN, infinite, or above
    `LARGE`. "dead": all zeros, or all zeros in its ``second_moment``, so no gradient has reached the
    tensor."""
    if values is None or "float" not in dtype or values["count"] < 2:
        return None
    wrong = [
        f"{values[name]:,} {word}" for name, word in (("nans", "NaN"), ("infs", "infinite")) if values[name]
    ]
    if wrong:
        return Mark("exploding", " and ".join(wrong))
    largest = largest_of(values)
    if largest is not None and largest > LARGE:
        return Mark("exploding", f"the largest is {largest:.3g}")
    if values["zeros"] == values["count"]:
        return Mark("dead", "all elements are 0")
    if second_moment is not None and second_moment["zeros"] == second_moment["count"] > 1:
        return Mark("dead", "its second moment is 0: no gradient has reached the tensor")
    return None


def largest_of(values: Values) -> float | None:
    """Return the largest finite magnitude; infinite if JSON cannot represent the value."""
    if not values["count"] or values["nans"] + values["infs"] == values["count"]:
        return None
    ends = [values["min"], values["max"]]
    return math.inf if None in ends else float(max(map(abs, ends)))


def norm_of(values: Values) -> float | None:
    """Return the norm of all elements: NaN or infinite with such an element."""
    return math.nan if values["nans"] else math.inf if values["infs"] else values["norm"]


def rms_of(values: Values) -> float | None:
    """Return the root mean square of the finite elements."""
    finite = values["count"] - values["nans"] - values["infs"]
    return values["norm"] / math.sqrt(finite) if finite and values["norm"] is not None else None


feature: Final = Feature("tensors", __name__, kinds=[StatsKind()], web=["routes", "page", "layers"])
