"""Differences of two checkpoints of any formats, roots, and shardings, by a job (kind ``diff``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from dcp.server.catalog.structures import TensorType
from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import CheckpointId, Globs, JobContext, Parameters, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import SimpleKind, Subject, read_tensors
from dcp.server.core.security.principal import Scope
from dcp.server.features.tensors import finite
from dcp.server.records.declaring import OneOf, Shown
from dcp.storage.formats.torch.python_values import value_text

if TYPE_CHECKING:
    from dcp.inspection.values import difference as compared


Basis = Literal["values", "checksums", "structure"]
"""values: by the last job "diff". checksums: by CRC-32 in both indexes. structure: by names, shapes, and
dtypes."""


DifferenceKind = Literal["added", "removed", "shape", "dtype", "changed", "undecided"]


DifferenceOrder = Literal["name", "relative_l2", "changed", "nonfinite", "weights"]
"""name: order of the checkpoint. All others: largest differences first."""


@dataclass(frozen=True, slots=True)
class ValueDistance:
    """Differences between the values of a tensor. ``relative_l2``: L2 norm of the differences, divided by the
    norm of the earlier tensor."""

    elements: Annotated[int, Shown("Elements of the tensor.")]
    differing: Annotated[int, Shown("Changed elements.")]
    nonfinite: Annotated[int, Shown("Of these, NaN or infinite on a side.")]
    max_abs: Annotated[
        float | None,
        Shown("Maximum difference; null for bits and without finite values."),
    ]
    relative_l2: Annotated[
        float | None,
        Shown(
            "The L2 norm of the differences divided by that of the tensor before; null if that is 0, and "
            "where nothing is finite."
        ),
    ]
    nonfinite_after: Annotated[
        int, Shown("NaN or infinite in the tensor after, whether they differ or not.", may_be_absent=True)
    ] = 0


@dataclass(frozen=True, slots=True)
class DifferingTensor:
    """Tensor that differs. "undecided": the job "diff" can compare the values. ``values``: differences found
    by the job."""

    fqn: str
    kind: Annotated[
        str,
        OneOf(DifferenceKind),
        Shown("undecided: checksums cannot decide; a job diff compares the values."),
    ]
    before: Annotated[TensorType | None, Shown("In the earlier checkpoint; null: added.")]
    after: Annotated[TensorType | None, Shown("In the later checkpoint; null: removed.")]
    values: Annotated[ValueDistance | None, Shown("Differences found by the job.", may_be_absent=True)] = None


@dataclass(frozen=True, slots=True)
class DifferingObject:
    """Value that differs: the first 200 characters on both sides for plain data."""

    fqn: str
    kind: Annotated[str, OneOf(DifferenceKind)]
    before: Annotated[str | None, Shown("As text, cut; of plain data.", may_be_absent=True)] = None
    after: Annotated[str | None, Shown("As text, cut; of plain data.", may_be_absent=True)] = None


@dataclass(frozen=True, slots=True)
class Diff:
    """Differences. `counts` cover all tensors, `tensors` is a page of the requested tensors, `objects` has
    the first 500 of ``object_count``."""

    a: Annotated[int, Shown("The `id` of the earlier checkpoint.")]
    b: Annotated[int, Shown("The `id` of the later checkpoint.")]
    basis: Annotated[
        str,
        OneOf(Basis),
        Shown(
            "values: compared by a job. checksums: by the manifests. structure: by names, shapes and dtypes."
        ),
    ]
    counts: Annotated[Mapping[str, int], Shown("Differing tensors by kind.")]
    equal_tensors: Annotated[int, Shown("Number of equal tensors.")]
    equal_objects: Annotated[int, Shown("Number of equal values.")]
    object_count: Annotated[int, Shown("Number of differing values.")]
    tensors: Annotated[tuple[DifferingTensor, ...], Shown("Differing tensors of this page.")]
    objects: Annotated[tuple[DifferingObject, ...], Shown("The first 500 differing values.")]
    next_cursor: str | None
    matching: Annotated[int | None, Shown("Requested tensors that differ.", may_be_absent=True)] = None
    job_id: Annotated[int | None, Shown("Job of the comparison.", may_be_absent=True)] = None
    created_at: Annotated[datetime | None, Shown("Of that job.", may_be_absent=True)] = None


_MAX_DIFFERENCES: Final = 50_000
_MAX_TEXT: Final = 200


class DiffParams(Parameters):
    """Compare ``b`` with the earlier ``a``; without ``values`` no payload is read."""

    a: CheckpointId = Field(description="The `id` of the earlier checkpoint.")
    b: CheckpointId = Field(description="The `id` of the later checkpoint.")
    values: bool = Field(default=True, description="Compare values, not only structure and checksums.")
    only: Globs | None = Field(default=None, description="Globs of names to compare; default: all.")
    exclude: Globs | None = Field(default=None, description="Globs of names to leave out.")


class DiffKind(SimpleKind[DiffParams]):
    """Difference of two checkpoints."""

    name: ClassVar[str] = "diff"
    about: ClassVar[str] = "Compare two checkpoints, value by value."
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

        with read_tensors(context, *subjects) as [(before, _), (after, _)]:
            found = diff(
                before,
                after,
                values=params.values,
                only=params.only,
                exclude=params.exclude,
                progress=lambda done, total: report_progress(done),
            )
        contents = {"a": subjects[0].content, "b": subjects[1].content}
        return {"a": params.a, "b": params.b, "contents": contents, **_document(found)}


def _document(found: compared.Difference) -> dict[str, Any]:
    """Return up to 50,000 differences of each kind. ``is_cut``: more exist. ``counts`` cover all."""
    return {
        "is_empty": found.is_empty,
        "tensors": [_plain(one) for one in found.tensors[:_MAX_DIFFERENCES]],
        "objects": [asdict(one) for one in with_texts(found.objects[:_MAX_DIFFERENCES])],
        "counts": Counter(one.kind for one in found.tensors),
        "tensor_count": len(found.tensors),
        "object_count": len(found.objects),
        "equal_tensors": len(found.equal),
        "equal_objects": found.equal_objects,
        "bytes_read": found.bytes_read,
        "is_cut": max(len(found.tensors), len(found.objects)) > _MAX_DIFFERENCES,
    }


def _plain(one: compared.TensorDifference) -> dict[str, Any]:
    found = asdict(one)
    if one.values is not None:
        found["values"] |= {name: finite(found["values"][name]) for name in ("max_abs", "relative_l2")}
    return found


def with_texts(objects: Sequence[compared.ObjectDifference]) -> list[compared.ObjectDifference]:
    """Return the differences with the first characters of values."""
    return [replace(one, before=_text_of(one.before), after=_text_of(one.after)) for one in objects]


def _text_of(value: Any) -> str | None:
    return None if value is None else value_text(value)[:_MAX_TEXT]


feature: Final = Feature("diff", __name__, kinds=[DiffKind()], web=["comparison"])
