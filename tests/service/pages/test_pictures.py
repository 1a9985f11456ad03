"""Internal: pure functions: bins, levels and places of boxes for any values, layers of any names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dcp.inspection.values.summaries import Summary
from dcp.server.catalog.contents.layers import in_order, is_of_optimizer, layer_number, layer_of
from dcp.server.jobs.kinds.shared.numbers import statistics_json
from dcp.server.pages.drawings.marks import mark_of


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
