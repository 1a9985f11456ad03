"""Weight maps. Internal: pure algebra of names and axes, with many more cases than files could show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dcp.planners.weight_maps.weight_map import WeightMap, ready_maps, weight_map
from dcp.storage.errors import OptionError, PlanError

LAYER = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}


def llama(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a small Llama's weights, with the names of transformers."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (7, 8), "model.norm.weight": (8,)}
    sizes = {"q": (24, 8), "k": (12, 8), "v": (12, 8), "o": (8, 24), "gate": (10, 8), "up": (10, 8)}
    sizes["down"] = (8, 10)
    for own in (f"model.layers.{layer}" for layer in range(layers)):
        shapes |= {f"{own}.{part}.{n}_proj.weight": sizes[n] for part, names in LAYER.items() for n in names}
        shapes |= {f"{own}.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    return shapes | {"lm_head.weight": (7, 8)}


def of(*rules: Mapping[str, Any], **sizes: int | str) -> WeightMap:
    """Return a map of these rules."""
    return WeightMap.of({"rules": rules, "sizes": sizes})


def fused(one: str, other: str, to: str, **sizes: Any) -> dict[str, Any]:
    """Return a rule that joins two tensors."""
    return {"from": {"a": one, "b": other}, "to": {"c": to}, "sizes": sizes}


def single(one: str, to: str, **sizes: Any) -> dict[str, Any]:
    """Return a rule for one tensor."""
    return {"from": {"a": one}, "to": {"c": to}, "sizes": sizes}


EXPERTS: dict[str, Any] = {"from": {"e.{n}": "x"}, "to": {"e": "n x"}}
RENAMED = [{"from": "a", "to": "c"}, {"from": "b", "to": "c"}]
PADDED = {"from": {"x": "(v + pad) w"}, "to": {"y": "v w"}, "padding": ["pad"], "sizes": {"pad": "0 - 2"}}
HUGE = {"padding": ["p"], "sizes": {"p": 1 << 47, "q": 1 << 47}}
UNFIT: list[tuple[Any, dict[str, tuple[int, ...]], str]] = [
    (RENAMED[0], {"a": (1,), "other": (1,)}, "no rule matches 'other'"),
    (fused("x", "y", "(x + y)"), {"a": (2,)}, "'b' is missing"),
    (single("x y", "y x"), {"a": (2,)}, "'a': the tensor has 1 dimensions"),
    (single("(x two)", "two x", two=2), {"a": (3,)}, "no size of x"),
    (single("(x y)", "y x"), {"a": (4,)}, "x and y in '(x y)' are not known"),
    (EXPERTS, {"e.0": (2,), "e.2": (2,)}, "n 1 is missing"),
    ({"from": "{rest:*}.a", "to": "b"}, {"x.a": (1,)}, "on one side only"),
    (RENAMED, {"a": (1,), "b": (1,)}, "two rules make the tensor 'c'"),
    (single("(x + y)", "x", y=1), {"a": (3,)}, "source elements with the axes y"),
    (single("x", "(x + y)", y=1), {"a": (3,)}, "no source has the elements"),
    (fused("x", "x", "x"), {"a": (3,), "b": (3,)}, "two tensors of one side have"),
    (fused("x", "y", "(x + y)"), {"a": (2,), "b": ()}, "'b': the tensor has 0 dimensions"),
    (PADDED, {"x": (4, 2)}, "pad = -2"),
    (EXPERTS | {"sizes": {"n": 3}}, {"e.0": (2,), "e.1": (2,)}, "the checkpoint has 2 of n, expected 3"),
    (EXPERTS, {"e.999999999": (2,)}, "n 0 is missing"),
    (EXPERTS, {"e.0": (2,), "e.1٣": (2,)}, "no rule matches"),
    ({"from": {"e": "n x"}, "to": {"e.{n}": "x"}}, {"e": (1 << 40, 0)}, "more than 1048576 tensors"),
    ({"from": {"x": "a"}, "to": {"y": "(a + p) q"}} | HUGE, {"x": (2,)}, "more than 1048576 tensors"),
    ({"from": "{a:*}.{b:*}", "to": "{b:*}.{a:*}"}, {"x.y.z": (2,)}, "'z.x.y' does not match"),
    ({"from": "{w:gate|up}", "to": "{w:g|u}"}, {"gate": (2,)}, "'gate' does not match"),
    ({"from": "x" * 200 + "{a:*}x{b:*}y", "to": "{a:*}{b:*}"}, {"x" * 10_000: (2,)}, "no rule matches"),
]


@pytest.mark.parametrize(("rule", "source", "message"), UNFIT, ids=range(len(UNFIT)))
def test_checkpoints_that_do_not_fit_a_map_are_refused(
    rule: Any, source: dict[str, tuple[int, ...]], message: str
) -> None:
    """Unknown sizes, missing tensors and names that do not map back raise before any data moves."""
    with pytest.raises((PlanError, OptionError)) as caught:
        of(*(rule if isinstance(rule, list) else [rule])).apply((n, s, 0, False) for n, s in source.items())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"rules": []},
        {"rules": [{"from": "a", "to": "b", "of": 1}]},
        *(
            {"rules": [{"from": {"a": axes}, "to": {"b": "x"}}]}
            for axes in ("(x", "x x", "x + y", "()", "(" * 99 + "x" + ")" * 99)
        ),
        {"rules": [{"from": "a{", "to": "b"}]},
        *(
            {"rules": [{"from": "a", "to": "b"}], "sizes": {"x": size}}
            for size in ("__import__('os')", "2 ** 9999", "1 // 0", True, 1 << 40_000)
        ),
        {"rules": [{"from": "a", "to": "\ud800"}]},
        {"rules": [{"from": "a", "to": "b", "when": "x["}]},
        "rules = 3",
        "{]",
    ],
)
def test_invalid_maps_are_refused(data: Any) -> None:
    """Invalid data raises OptionError."""
    with pytest.raises(OptionError):
        WeightMap.from_data(data)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"from": {"x": "(a + a)"}, "to": {"y": "a"}}, "two tensors of one side have the axes a"),
        ({"from": {"x": "a"}, "to": {"y": "(a + a)"}}, "two tensors of one side have the axes a"),
        ({"from": {"x": "a"}, "to": {"y": "a", "z": "a"}}, "list equal targets in copies"),
        (
            {"from": {"x": "a"}, "to": {"y": "a", "z": "a"}, "copies": ["zz"]},
            "copies has 'zz', which is not a name",
        ),
        ({"from": {"x": "a"}, "to": {"y": "a"}, "copies": ["y"]}, "copies has all names of a side"),
        (
            {"from": {"x": "a"}, "to": {"x": "a", "y": "a"}, "copies": ["x"]},
            "copies has 'x', which is not a name",
        ),
        ({"from": {"x.{n}": "n a"}, "to": {"y": "n a"}}, "n is both an axis and a variable part"),
        ({"from": {"x": "n a"}, "to": {"y.{n}": "n a"}}, "n is both an axis and a variable part"),
        ({"from": {"x": " ".join(["(a + b)"] * 40)}, "to": {"y": "a"}}, "more than 4096 parts"),
        ({"from": "{a:*}{b:*}{c:*}x", "to": "{a:*}{b:*}{c:*}y"}, "wildcards"),
        ({"from": {"x": "a"}, "to": {"y": "a"}, "sizes": {"a": 10**30}}, "not an expression of names"),
        ({"from": {"x": "a"}, "to": {"y": "a"}, "sizes": {"a": -1}}, "not an expression of names"),
        ({"from": "a.{é}", "to": "b.{é}"}, "is not a valid name"),
    ],
)
def test_rules_that_would_lose_or_repeat_elements_are_refused(rule: dict[str, Any], message: str) -> None:
    """Repeated axes, invalid copies and unbounded expressions raise OptionError without a checkpoint."""
    with pytest.raises(OptionError) as caught:
        of(rule)
    assert message in str(caught.value)


def test_sizes_come_from_configuration_or_name() -> None:
    """The sizes that an error asks for can be given by the configuration or by name."""
    source = {"model.layers.0.self_attn.q_proj.weight": (24, 8)}

    def half_of(**numbers: Any) -> int:
        (tensor,) = weight_map("llama:hf-to-titan", **numbers).apply(
            (name, shape, 1, False) for name, shape in source.items()
        )
        return tensor.sizes["half"]

    with pytest.raises(PlanError, match="sizes of heads and half"):
        half_of()
    assert half_of(num_attention_heads=4) == half_of(heads=4) == half_of(num_attention_heads=9, heads=4) == 3
    with pytest.raises(PlanError, match="no size of half"):
        half_of(heads=5)
    with pytest.raises(OptionError, match=r"'4\.5' is not an expression"):
        half_of(heads=4.5)


def test_missing_last_layers_are_an_error() -> None:
    """Missing last layers of a whole model are an error by its configuration, but not of a part."""
    source = llama(layers=2)
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_hidden_layers": 4}
    weights = WeightMap.of("llama:hf-to-titan").with_config(config)
    given = [(name, shape, 0, False) for name, shape in source.items()]
    with pytest.raises(
        PlanError, match=r"has 4 of layer \(num_hidden_layers\), but the checkpoint lacks 2 and 1 more"
    ):
        weights.apply(given, is_whole=True)
    assert len(weights.apply(given)) == len(source)
    assert len(weights.with_config({"num_hidden_layers": 2}).apply(given, is_whole=True)) == len(source)


def test_a_model_of_another_type_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A map for another model type is a warning, once a configuration: equal names may differ in meaning."""
    for name in ready_maps():
        weights = WeightMap.of(name)
        assert weights.models
        for model in weights.models:
            weights.with_config({"model_type": model}).with_numbers({}).beside({"model_type": "other"})
    weight_map("llama:hf-to-titan", {"num_attention_heads": 4}, heads=3)
    of({"from": "a", "to": "b"}).beside({"model_type": "gemma"})
    assert not caplog.records
    weight_map("llama:hf-to-titan").inverse.beside({"model_type": "gemma2"}).beside({"model_type": "x"})
    weight_map("llama:hf-to-titan", {"model_type": "qwen3"}, heads=4)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2 and "for models of type llama or mistral" in warnings[0]
    assert "'gemma2'" in warnings[0] and "'qwen3'" in warnings[1]
