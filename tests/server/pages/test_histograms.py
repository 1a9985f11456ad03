"""Histograms as bars: of one tensor as they are, of several on edges that cut no bin."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from dcp.inspection.values.summaries import Summary
from dcp.server.jobs.kinds.shared.numbers import statistics_json
from dcp.server.pages.drawings.histograms import histogram_picture


def _of(values: Any, bins: int = 32) -> Any:
    summary = Summary()
    summary.add(np.asarray(values, np.float64))
    found = statistics_json(summary.result(bins), histogram=True)
    assert found is not None
    return found["histogram"]


def test_bars_are_the_bins() -> None:
    """With their counts and shares; one element among many is seen; ticks are at both ends and at zero."""
    random = np.random.default_rng(3)
    values = np.append(random.normal(size=200_000), [900.0, 0.0])
    kept = _of(values)
    picture = histogram_picture({"w": kept})
    assert picture is not None
    assert [bar.counts for bar in picture.bars] == [(count,) for count in kept["counts"]]
    assert sum(bar.shares[0] for bar in picture.bars) > 0.999999
    assert picture.bars[-1].counts == (1,) and picture.bars[-1].heights[0] > 0.5
    assert max(bar.heights[0] for bar in picture.bars) == 100
    assert [value for _, value in picture.ticks][0 :: len(picture.ticks) - 1] == [
        kept["edges"][0],
        kept["edges"][-1],
    ]
    assert 0.0 in [value for _, value in picture.ticks]
    assert all(0 <= place <= 100 for place, _ in picture.ticks)
    near = histogram_picture({"a": {"edges": [-1, -0.5, 0.5, *range(1, 40)], "counts": [1] * 41}})
    assert near is not None
    places = [place for place, _ in near.ticks]
    assert min(b - a for a, b in pairwise(places)) > 15, "their names do not lie over each other"


def test_several_have_common_edges() -> None:
    """Whatever their ranges: none of a tensor's elements is lost, moved over an edge, or counted by guess."""
    random = np.random.default_rng(5)
    cases = {
        "normal": random.normal(size=4_000),
        "small": random.normal(size=3_000) * 2.0**-30,
        "positive": np.abs(random.normal(size=1_000)) + 2.0,
        "negative": -np.abs(random.normal(size=1_000)) * 1e-3,
        "zeros": np.zeros(7),
        "wide": random.normal(size=500) * 10.0 ** random.integers(-200, 200, 500),
    }
    for first, a in cases.items():
        for second, b in cases.items():
            for bins in (32, 9):
                picture = histogram_picture({"a": _of(a), "b": _of(b, bins)})
                assert picture is not None
                edges = [picture.bars[0].low, *(bar.high for bar in picture.bars)]
                assert edges == sorted(edges), (first, second)
                for place, values in enumerate((a, b)):
                    counts = [bar.counts[place] for bar in picture.bars]
                    assert sum(counts) == len(values), (first, second)
                    for (low, high), count in zip(pairwise(edges), counts, strict=True):
                        inside = np.count_nonzero((values > low) & (values < high))
                        assert inside <= count, (first, second, low, high)


def test_what_has_none_is_left_out() -> None:
    """Bits without a meaning, and what is all NaN, have no histogram; with none there is no picture."""
    assert histogram_picture({"a": None}) is None
    picture = histogram_picture({"a": None, "b": _of([1.0, 2.0])})
    assert picture is not None and picture.names == ("b",)
    empty = {"edges": [0.0, 0.0], "counts": [0]}
    assert histogram_picture({"a": empty}) is not None
    infinite = histogram_picture({"a": {"edges": [None, -1.0, 1.0, None], "counts": [1, 2, 3]}})
    assert infinite is not None
    assert [bar.counts for bar in infinite.bars] == [(1,), (2,), (3,)]
