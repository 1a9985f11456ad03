"""Records of differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from dcp.server.records.contents import TensorFacts
from dcp.server.records.declaring import OneOf, Shown

__all__ = [
    "Basis",
    "Diff",
    "DifferenceKind",
    "DifferenceOrder",
    "ObjectDifference",
    "TensorDifference",
    "ValueDifference",
]

Basis = Literal["values", "checksums", "structure"]
"""values: as the job "diff" has found last. checksums: whether they differ, by the CRC-32s in both indexes.
structure: names, shapes and dtypes alone."""
DifferenceKind = Literal["added", "removed", "shape", "dtype", "changed", "undecided"]
DifferenceOrder = Literal["name", "relative_l2", "changed", "nonfinite", "weights"]
"""name: as they were saved. The others: those first that differ most."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """By how much the values of a tensor differ. ``relative_l2``: the L2 norm of the differences divided by
    that of the tensor before."""

    elements: int
    differing: Annotated[int, Shown("That are not the same.")]
    nonfinite: Annotated[int, Shown("Of these, NaN or infinite on a side.")]
    max_abs: Annotated[
        float | None,
        Shown("The greatest difference; null for bits without a meaning, and where nothing is finite."),
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
class TensorDifference:
    """A tensor that is not the same on both sides; "undecided": the job "diff" can tell of its values.
    ``values``: by how much, where that job has compared them."""

    fqn: str
    kind: Annotated[str, OneOf(DifferenceKind)]
    before: TensorFacts | None
    after: TensorFacts | None
    values: Annotated[
        ValueDifference | None, Shown("By how much, as the job has found.", may_be_absent=True)
    ] = None


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A value that is not the same on both sides: the first 200 characters of each, if it is plain data."""

    fqn: str
    kind: Annotated[str, OneOf(DifferenceKind)]
    before: Annotated[str | None, Shown("As text, cut; of plain data.", may_be_absent=True)] = None
    after: Annotated[str | None, Shown("As text, cut; of plain data.", may_be_absent=True)] = None


@dataclass(frozen=True, slots=True)
class Diff:
    """Differences. `counts` are of all tensors, `tensors` are a page of the requested ones; `objects` are the
    first 500 of ``object_count``."""

    a: int
    b: int
    basis: Annotated[str, OneOf(Basis)]
    counts: Mapping[str, int]
    equal_tensors: int
    equal_objects: int
    object_count: Annotated[int, Shown("Of the values that differ.")]
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]
    next_cursor: str | None
    matching: Annotated[int | None, Shown("Tensors that differ and were asked for.", may_be_absent=True)] = (
        None
    )
    job_id: Annotated[int | None, Shown("The job that compared values.", may_be_absent=True)] = None
    created_at: Annotated[datetime | None, Shown("Of that job.", may_be_absent=True)] = None
