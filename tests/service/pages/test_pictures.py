"""Internal: pure functions: bins, levels and places of boxes for any values, layers of any names."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from dcp.inspection.values.difference import TensorDifference, TensorFacts
from dcp.inspection.values.summaries import Summary
from dcp.inspection.values.tensor_differences import ValueDifference
from dcp.server.catalog.contents.layers import in_order, is_of_optimizer, layer_number, layer_of
from dcp.server.data.drawings.phases import save_phases
from dcp.server.jobs.kinds.shared.numbers import statistics_json
from dcp.server.pages.drawings.changes import WeightChange
from dcp.server.pages.drawings.drift import drift_picture
from dcp.server.pages.drawings.graphs import BOX_HEIGHT, BOX_WIDTH, NodeBox, graph_of
from dcp.server.pages.drawings.histograms import histogram_picture
from dcp.server.pages.drawings.marks import mark_of
from dcp.server.pages.sentences import waiting_of
from dcp.server.records.declaring import moment
from dcp.server.records.drawings import DriftLayer
from dcp.server.records.labels import LineageEdge, LineageNode


def _of(values: Any, bins: int = 32) -> Any:
    summary = Summary()
    summary.add(np.asarray(values, np.float64))
    found = statistics_json(summary.result(bins), histogram=True)
    assert found is not None
    return found["histogram"]


def test_bars_are_the_bins() -> None:
    """With their counts and shares; one element among many is seen; ticks are at both ends and at zero."""
    values = np.append(np.random.default_rng(3).normal(size=200_000), [900.0, 0.0])
    kept = _of(values)
    picture = histogram_picture({"w": kept})
    assert picture is not None
    assert [bar.counts for bar in picture.bars] == [(count,) for count in kept["counts"]]
    assert sum(bar.shares[0] for bar in picture.bars) > 0.999999
    assert picture.bars[-1].counts == (1,) and picture.bars[-1].heights[0] > 0.5
    assert max(bar.heights[0] for bar in picture.bars) == 100
    ticks = [value for _, value in picture.ticks]
    assert (ticks[0], ticks[-1]) == (kept["edges"][0], kept["edges"][-1]) and 0.0 in ticks
    near = histogram_picture({"a": {"edges": [-1, -0.5, 0.5, *range(1, 40)], "counts": [1] * 41}})
    assert near is not None
    assert min(b[0] - a[0] for a, b in pairwise(near.ticks)) > 15, "names do not lie over each other"


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
    for (first, a), (second, b), bins in product(cases.items(), cases.items(), (32, 9)):
        picture = histogram_picture({"a": _of(a), "b": _of(b, bins)})
        assert picture is not None
        edges = [picture.bars[0].low, *(bar.high for bar in picture.bars)]
        assert edges == sorted(edges), (first, second)
        for place, values in enumerate((a, b)):
            counts = [bar.counts[place] for bar in picture.bars]
            assert sum(counts) == len(values), (first, second)
            for (low, high), count in zip(pairwise(edges), counts, strict=True):
                assert np.count_nonzero((values > low) & (values < high)) <= count, (first, second, low, high)


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


def layers(count: int, width: int = 3) -> list[DriftLayer]:
    """Numbered ones that move the more the later they come."""
    moves = [(n / count,) * width for n in range(count)]
    return [DriftLayer(f"m.layers.{n}", each, each, (0,) * width) for n, each in enumerate(moves)]


def test_thousands_of_layers_are_binned() -> None:
    """Neighbours share a row with the greatest of their values; a row opened shows its own."""
    picture = drift_picture(layers(500), 3, "relative_l2")
    assert picture.height <= 66 and sum(row.count for row in picture.rows) == 500
    binned = picture.rows[-1]
    assert binned.values == (499 / 500,) * 3 and binned.label.endswith(" 499")
    opened = drift_picture(layers(500), 3, "relative_l2", binned.first, binned.count)
    assert [row.label for row in opened.rows if row.count][-1] == "499"
    assert picture.rows[0].label == "m.layers" and not picture.rows[0].count
    nan = drift_picture([DriftLayer("a", (0.0, 0.0), (0.0, 0.0), (0, 3))], 2, "changed")
    assert {kind: path.count("M") for kind, path in nan.paths.items()} == {"l0": 1, "nan": 1}


@pytest.mark.parametrize("values", [(None,), (0.0,), (0.5,), (1e-30, 1.0), (1e300, 1e-300)])
def test_levels_of_any_values(values: tuple[float | None, ...]) -> None:
    """Nothing, one value, all alike, and many decades: each cell has a level that there is."""
    layer = DriftLayer("a", values, values, (0,) * len(values))
    picture = drift_picture([layer], len(values), "relative_l2")
    assert set(picture.paths) <= {f"l{level}" for level in range(9)}
    assert sum(path.count("M") for path in picture.paths.values()) == sum(one is not None for one in values)


def node(number: int, distance: int) -> LineageNode:
    """One of a graph."""
    return LineageNode(number, "main", f"run/{number}", number, "dcp", "committed", distance)


def edge(child: int, parent: int) -> LineageEdge:
    """One of a graph."""
    return LineageEdge(child, parent, "converted_from", None, moment(1_700_000_000.0))


def is_apart(one: NodeBox, other: NodeBox) -> bool:
    """Whether neither lies on the other."""
    return abs(one.x - other.x) >= BOX_WIDTH or abs(one.y - other.y) >= BOX_HEIGHT


def test_a_graph_is_laid_out_in_columns() -> None:
    """By distance from left to right; no box lies on another; lines go from right edges to left ones."""
    nodes = [node(1, 0), node(2, -1), node(3, 1), node(4, 1), node(5, 2)]
    graph = graph_of(nodes, [edge(1, 2), edge(3, 1), edge(4, 1), edge(5, 4)])
    places = {box.node.id: box for box in graph.boxes}
    assert places[2].x < places[1].x < places[3].x == places[4].x < places[5].x
    assert all(is_apart(a, b) for a in graph.boxes for b in graph.boxes if a is not b)
    assert (graph.left_out, len(graph.lines)) == (0, 4)
    for line in graph.lines:
        start, end = places[line.edge.parent_id], places[line.edge.child_id]
        assert line.path.startswith(f"M{start.x + BOX_WIDTH} ")
        assert line.path.endswith(f" {end.x} {end.y + BOX_HEIGHT // 2}")
    assert all(0 <= box.y <= graph.height - BOX_HEIGHT for box in graph.boxes)
    assert max(box.x for box in graph.boxes) == graph.width - BOX_WIDTH


def test_children_are_as_high_as_their_parents() -> None:
    """So that lines do not cross."""
    nodes = [node(1, 0), node(2, 1), node(3, 1), node(12, 2), node(13, 2)]
    graph = graph_of(nodes, [edge(2, 1), edge(3, 1), edge(13, 2), edge(12, 3)])
    places = {box.node.id: box.y for box in graph.boxes}
    assert places[2] < places[3] and places[13] < places[12]


def test_what_is_too_much_is_left_out_of_the_graph() -> None:
    """A column has an end, and so has the distance; lines to what is not drawn are not drawn, either."""
    nodes = [node(0, 0), *(node(n, 1) for n in range(1, 101)), *(node(100 + n, -n) for n in range(1, 21))]
    edges = [
        *(edge(n, 0) for n in range(1, 101)),
        *(edge(100 + n, 101 + n) for n in range(1, 20)),
        edge(0, 101),
    ]
    graph = graph_of(nodes, edges)
    assert len(graph.boxes) == 1 + 12 + 6
    assert graph.left_out == 121 - 19
    assert len(graph.lines) == 12 + 6


@pytest.mark.parametrize(
    ("values", "second", "kind", "says"),
    [
        ([0.5, -2.0], None, None, ""),
        ([0.5, math.nan], None, "exploding", "1 NaN"),
        ([0.5, -math.inf, math.nan], None, "exploding", "1 NaN and 1 infinite"),
        ([-20_000.0, 0.0], None, "exploding", "the largest is 2e+04"),
        ([0.0, 0.0], None, "dead", "all of it is 0"),
        ([0.5, 0.5], [0.0, 0.0], "dead", "no gradient has reached it"),
        ([0.5, 0.5], [0.0, 1e-30], None, ""),
        ([20_000.0], None, None, ""),
        ([], None, None, ""),
    ],
)
def test_what_is_dead_and_what_explodes(
    values: list[float], second: list[float] | None, kind: str | None, says: str
) -> None:
    """By the rules that pages state; single numbers, such as steps, are neither."""

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


@pytest.mark.parametrize(
    ("relative", "colour"), [(0.0, "q1"), (1e-9, "q1"), (2e-5, "q2"), (0.02, "q5"), (0.1, "q6"), (30.0, "q6")]
)
def test_colours_are_powers_of_ten(relative: float, colour: str) -> None:
    """Of what differs; the last one is open."""
    change = WeightChange(total_bytes=400)
    values = ValueDifference(elements=100, differing=1, nonfinite=0, max_abs=None, relative_l2=relative)
    facts = TensorFacts("w", "float32", (100,))
    change.add(TensorDifference("w", "changed", facts, facts, values), facts)
    assert change.colour == colour
    assert change.relative_l2 == pytest.approx(relative)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [{"plan": 0.1, "write": 1.0}] * 3,
            "The save took 1.1 s, and training waited for all of it. "
            "Most of that was write: 1.0 s, about as long on all ranks.",
        ),
        (
            [{"write": 3.0}],
            "The save took 3.0 s, and training waited for all of it. Most of that was write: 3.0 s.",
        ),
        (
            [{"blocked": 0.2 + 2 * (n == 1), "write": 9.0} for n in range(4)],
            "Most of that was write: 9.0 s, about as long on all ranks. "
            "Blocked: it waited for rank 1, which took 2.2 s, 11.0 times the median of 0.2 s.",
        ),
        ([{"global_plan": 0.5 * (n == 0), "write": 0.1} for n in range(4)], "0.5 s on rank 0."),
        ([{"write": 1.0}, {"write": 1.04}, {"write": 1.02}], "about as long on all ranks"),
        (["nonsense", {"write": 0.0}], "Most of that was write: 0.0 s."),
        ([], ""),
    ],
)
def test_sentences_of_saves(ranks: list[Any], said: str) -> None:
    """Names a straggler, and none if ranks differ by times that nobody notices."""
    found = " ".join(waiting_of(save_phases({"rank_seconds": ranks})))
    assert said in found and bool(found) == bool(said)


# -- names of layers ----------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[str, int | None]] = {
    "model.layers.3.mlp.up.weight": ("model.layers.3", 3),
    "layers.12.weight": ("layers.12", 12),
    "0.weight": ("0", 0),
    "model.layers_2.attention.q.weight": ("model.layers_2", 2),
    "experts.7.layers.1.w": ("experts.7", 7),
    "model.block3.conv.weight": ("model.block3.conv", None),
    "weights.3": ("weights", None),
    "head": ("head", None),
    "": ("", None),
    ".": (".", None),
    "a\nb.1.w": ("a\nb.1", 1),
    "\x00.1.w": ("\\x00.1", 1),
    f"layers.{'9' * 5000}.w": (f"layers.{'9' * 5000}", None),
}
OF_OPTIMIZERS = (
    "optimizer.state.0.exp_avg",
    "app.optimizer.state.w",
    "optim",
    "adam_optim_0.w",
    "Optimisers.1",
)


def test_layers() -> None:
    """To the first number that stands by itself and has something below it; else to the last dot. Of an
    optimizer is what its first two names say; order is as people count."""
    assert {fqn: (layer_of(fqn), layer_number(fqn)) for fqn in LAYERS} == LAYERS
    assert all(map(is_of_optimizer, OF_OPTIMIZERS))
    assert not any(map(is_of_optimizer, ("model.optimal.weight", "model.blocks.optimizer", "")))
    names = ["a", "layers.2", "layers.10", "layers.10.b", f"layers.{'1' * 5000}", f"layers.{'2' * 5000}"]
    assert sorted(names) != names and sorted(sorted(names), key=in_order) == names
