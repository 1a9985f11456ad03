"""Internal: rules for dead and exploding tensors, with values that no training gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dcp.inspection.values.statistics import Summary
from dcp.server.features.tensors import mark_of, statistics_json


@pytest.mark.parametrize(
    ("values", "second", "kind", "says"),
    [
        ([0.5, -2.0], None, None, ""),
        ([0.5, math.nan], None, "exploding", "1 NaN"),
        ([0.5, -math.inf, math.nan], None, "exploding", "1 NaN and 1 infinite"),
        ([-20_000.0, 0.0], None, "exploding", "the largest is 2e+04"),
        ([0.0, 0.0], None, "dead", "all elements are 0"),
        ([0.5, 0.5], [0.0, 0.0], "dead", "no gradient has reached the tensor"),
        ([0.5, 0.5], [0.0, 1e-30], None, ""),
        ([20_000.0], None, None, ""),
        ([], None, None, ""),
    ],
)
def test_dead_and_exploding_tensors(
    values: list[float], second: list[float] | None, kind: str | None, says: str
) -> None:
    """A tensor is dead or exploding by the rules on the page; single numbers, such as steps, are neither."""

    def of(numbers: list[float] | None) -> Any:
        if numbers is None:
            return None
        summary = Summary()
        summary.add(np.asarray(numbers, np.float32))
        return statistics_json(summary.result(8), histogram=False)

    mark = mark_of("float32", of(values), of(second))
    assert (mark and mark.kind) == kind
    assert mark is None or says in mark.reason
    assert mark_of("int64", of(values), of(second)) is None
