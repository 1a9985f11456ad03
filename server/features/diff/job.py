"""Differences of two checkpoints (kind ``diff``), whatever their formats, roots and shardings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from dcp.server.core.jobs.kind import CheckpointId, Globs, JobContext, Parameters, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import (
    SimpleKind,
    Subject,
    open_source,
    storage_errors,
)
from dcp.server.core.security.principal import Scope
from dcp.server.features.statistics.job import finite
from dcp.storage.formats.torch.python_values import value_text

if TYPE_CHECKING:
    from dcp.inspection.values.difference import Difference, TensorFacts, ValueDifference
    from dcp.inspection.values.tensor_reading import TensorReader

__all__ = ["DiffKind", "DiffParams", "readers_of", "text_of"]

_MAX_DIFFERENCES: Final = 50_000
_MAX_TEXT: Final = 200


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

        with readers_of(context, *subjects) as (before, after):
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


@contextmanager
def readers_of(context: JobContext, a: Subject, b: Subject) -> Iterator[tuple[TensorReader, TensorReader]]:
    """Readers of two checkpoints, which compare all that they read with its checksums."""
    from dcp.inspection.values.tensor_reading import TensorReader

    root_a, first = open_source(context, a)
    root_b, second = open_source(context, b)
    with (
        storage_errors(root_a, root_b),
        TensorReader(first.store, first.index, verify="full", name=first.name) as before,
        TensorReader(second.store, second.index, verify="full", name=second.name) as after,
    ):
        yield before, after


def _document(found: Difference) -> dict[str, Any]:
    """The differences, up to 50,000 of each; ``is_cut``: there are more. ``counts`` are of all."""
    return {
        "is_empty": found.is_empty,
        "tensors": [
            {
                "fqn": one.fqn,
                "kind": one.kind,
                "before": _facts(one.before),
                "after": _facts(one.after),
                "values": None if one.values is None else _values(one.values),
            }
            for one in found.tensors[:_MAX_DIFFERENCES]
        ],
        "objects": [
            {"fqn": one.fqn, "kind": one.kind, "before": text_of(one.before), "after": text_of(one.after)}
            for one in found.objects[:_MAX_DIFFERENCES]
        ],
        "counts": Counter(one.kind for one in found.tensors),
        "tensor_count": len(found.tensors),
        "object_count": len(found.objects),
        "equal_tensors": len(found.equal),
        "equal_objects": found.equal_objects,
        "bytes_read": found.bytes_read,
        "is_cut": max(len(found.tensors), len(found.objects)) > _MAX_DIFFERENCES,
    }


def _facts(facts: TensorFacts | None) -> dict[str, Any] | None:
    return None if facts is None else {"fqn": facts.fqn, "dtype": facts.dtype, "shape": list(facts.shape)}


def _values(values: ValueDifference) -> dict[str, Any]:
    return {
        "elements": values.elements,
        "differing": values.differing,
        "nonfinite": values.nonfinite,
        "max_abs": finite(values.max_abs),
        "relative_l2": finite(values.relative_l2),
        "nonfinite_after": values.nonfinite_after,
    }


def text_of(value: Any) -> str | None:
    """The beginning of a value as text."""
    return None if value is None else value_text(value)[:_MAX_TEXT]
