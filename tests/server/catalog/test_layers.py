"""Which layer a tensor is of: one rule for jobs, tables and pictures."""

from __future__ import annotations

import pytest

from dcp.server.catalog.contents.layers import in_order, is_of_optimizer, layer_number, layer_of


@pytest.mark.parametrize(
    ("fqn", "layer", "number"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3", 3),
        ("layers.12.weight", "layers.12", 12),
        ("0.weight", "0", 0),
        ("model.layers_2.weight", "model.layers_2", 2),
        ("model.layers_2.attention.q.weight", "model.layers_2", 2),
        ("experts.7.layers.1.w", "experts.7", 7),
        ("model.block3.conv.weight", "model.block3.conv", None),
        ("model.norm.weight", "model.norm", None),
        ("weights.3", "weights", None),
        ("head", "head", None),
        ("", "", None),
        (".", ".", None),
        ("a\nb.1.w", "a\nb.1", 1),
        ("\x00.1.w", "\\x00.1", 1),
        (f"layers.{'9' * 5000}.w", f"layers.{'9' * 5000}", None),
    ],
)
def test_layers(fqn: str, layer: str, number: int | None) -> None:
    """To the first number that stands by itself and has something below it; else to the last dot."""
    assert (layer_of(fqn), layer_number(fqn)) == (layer, number)


@pytest.mark.parametrize(
    ("fqn", "is_of"),
    [
        ("optimizer.state.0.exp_avg", True),
        ("app.optimizer.state.w", True),
        ("optim", True),
        ("adam_optim_0.w", True),
        ("Optimisers.1", True),
        ("model.optimal.weight", False),
        ("model.blocks.optimizer", False),
        ("", False),
    ],
)
def test_of_an_optimizer(fqn: str, is_of: bool) -> None:
    """By its first two names."""
    assert is_of_optimizer(fqn) == is_of


def test_layers_are_in_order_as_people_count() -> None:
    """Also those whose numbers have thousands of digits, which `int` refuses."""
    names = ["a", "layers.2", "layers.10", "layers.10.b", f"layers.{'1' * 5000}", f"layers.{'2' * 5000}"]
    shuffled = sorted(names)
    assert shuffled != names and sorted(shuffled, key=in_order) == names
