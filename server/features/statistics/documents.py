"""Statistics and differences as JSON, which has no NaN and no infinity."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from dcp.storage.formats.torch.python_values import value_text

if TYPE_CHECKING:
    from dcp.inspection.values.difference import Difference, TensorFacts
    from dcp.inspection.values.statistics import CheckpointStatistics, ElementStatistics

__all__ = ["difference_document", "statistics_document", "statistics_json"]

_HISTOGRAMS: Final = 512
"""Of so many tensors histograms are kept; of more they would be larger than some checkpoints."""
_MAX_DIFFERENCES: Final = 50_000
_MAX_TEXT: Final = 200


def _number(value: float | int | None) -> float | int | None:
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else float(value)
    return value if value is not None and math.isfinite(value) else None


def statistics_json(found: ElementStatistics | None, *, histogram: bool) -> dict[str, Any] | None:
    """The statistics of one tensor; ``histogram``: with it."""
    if found is None:
        return None
    numbers = ("min", "max", "mean", "std", "norm")
    document: dict[str, Any] = {name: getattr(found, name) for name in ("count", "nans", "infs", "zeros")}
    document |= {name: _number(getattr(found, name)) for name in numbers}
    bins = found.histogram if histogram else None
    document["histogram"] = (
        None
        if bins is None
        else {"edges": [_number(edge) for edge in bins.edges], "counts": list(bins.counts)}
    )
    return document


def statistics_document(found: CheckpointStatistics) -> dict[str, Any]:
    """``tensors`` in their order, and the ``total``. What is not finite is null."""
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


def difference_document(found: Difference) -> dict[str, Any]:
    """What differs, up to 50,000 of each; ``is_cut`` says whether there was more. ``counts`` are of all."""
    tensors = []
    for one in found.tensors[:_MAX_DIFFERENCES]:
        values = one.values
        tensors.append(
            {
                "fqn": one.fqn,
                "kind": one.kind,
                "before": _facts(one.before),
                "after": _facts(one.after),
                "values": None
                if values is None
                else {
                    "elements": values.elements,
                    "differing": values.differing,
                    "nonfinite": values.nonfinite,
                    "max_abs": _number(values.max_abs),
                    "relative_l2": _number(values.relative_l2),
                    "nonfinite_after": values.nonfinite_after,
                },
            }
        )
    objects = [
        {
            "fqn": one.fqn,
            "kind": one.kind,
            "before": None if one.before is None else value_text(one.before)[:_MAX_TEXT],
            "after": None if one.after is None else value_text(one.after)[:_MAX_TEXT],
        }
        for one in found.objects[:_MAX_DIFFERENCES]
    ]
    return {
        "is_empty": found.is_empty,
        "tensors": tensors,
        "objects": objects,
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
