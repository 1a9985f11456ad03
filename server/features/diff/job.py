"""``diff``: what differs between two checkpoints, of whatever formats, roots and shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dcp.server.core.jobs.kind import JobContext, ReportProgress
from dcp.server.core.jobs.ledger.states import Json
from dcp.server.core.jobs.parameters import CheckpointId, Globs, Parameters
from dcp.server.core.jobs.simple_kind import SimpleKind
from dcp.server.core.jobs.subjects import (
    Subject,
    open_source,
    storage_errors,
)
from dcp.server.core.security.principal import Scope
from dcp.server.features.statistics.documents import difference_document

__all__ = ["DiffKind", "DiffParams"]


class DiffParams(Parameters):
    """``b`` is compared with ``a``, the one before; without ``values`` no payload is read."""

    a: CheckpointId
    b: CheckpointId
    values: bool = True
    only: Globs | None = None
    exclude: Globs | None = None


class DiffKind(SimpleKind[DiffParams]):
    """The difference of two checkpoints."""

    name: ClassVar[str] = "diff"
    scope: ClassVar[Scope] = "read"
    params = DiffParams
    subjects: ClassVar[tuple[str, ...]] = ("a", "b")
    preload: ClassVar[tuple[str, ...]] = (
        "dcp.inspection.values.difference",
        "dcp.inspection.values.tensor_reading",
    )

    def run(
        self,
        context: JobContext,
        params: DiffParams,
        subjects: Sequence[Subject],
        report_progress: ReportProgress,
    ) -> Json:
        """As `SimpleKind.run`."""
        from dcp.inspection.values.difference import diff
        from dcp.inspection.values.tensor_reading import TensorReader

        root_a, a = open_source(context, subjects[0])
        root_b, b = open_source(context, subjects[1])
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
        contents = {"a": subjects[0].content, "b": subjects[1].content}
        return {"a": params.a, "b": params.b, "contents": contents, **difference_document(found)}
