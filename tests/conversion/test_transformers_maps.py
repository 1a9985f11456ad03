"""transformers' own conversions as weight maps: equal results, and errors for unsupported operations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dcp
from dcp.errors import PlanError

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Mixtral", {"num_local_experts": 4}),
        pytest.param(
            "Qwen3Moe",
            {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_mapped_loads_equal_from_pretrained(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    """A load through the map equals `from_pretrained`; a save through the inverse equals the checkpoint."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**_SIZES, **sizes)
    torch.manual_seed(0)
    build: Any = transformers.AutoModelForCausalLM.from_config
    made = build(config)
    made.save_pretrained(tmp_path / "hf")
    weights = dcp.transformers_map(tmp_path / "hf")
    stored = dcp.read(tmp_path / "hf")
    wanted = made.state_dict()
    assert stored.keys() != wanted.keys()
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(state, checkpoint_id=tmp_path / "hf", map=weights, no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    again = dcp.transformers_map(tmp_path / "hf", made)
    dcp.save(wanted, checkpoint_id=tmp_path / "back", map=again.inverse, no_dist=True)
    back = dcp.read(tmp_path / "back")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())


Operation = tuple[str, dict[str, Any]]
"""Name of a transformers operation, and its arguments. Classes would need a slow import at collection."""

_OPERATIONS: list[tuple[list[str], list[str], list[Operation]]] = [
    (["q", "k"], ["qk"], [("Concatenate", {"dim": 1})]),
    (["w"], ["a", "b"], [("Chunk", {"dim": 0})]),
    (["w"], ["t"], [("Transpose", {"dim0": 0, "dim1": 1})]),
    (["w"], ["t"], [("Interleave", {"dim": 1})]),
    (["w"], ["t"], [("Interleave", {"dim": 0, "inverse": True})]),
    (["w"], ["t"], [("PermuteForRope", {})]),
    (["w"], ["t"], [("PermuteForRope", {"inverse": True})]),
    (["q", "k"], ["qk"], [("PermuteForRope", {"permute_layer_names": ["q"]}), ("Concatenate", {"dim": 0})]),
    (["experts.*.q"], ["qs"], [("MergeModulelist", {"dim": 1})]),
    (["experts.*.q", "experts.*.k"], ["qks"], [("MergeModulelist", {}), ("Concatenate", {"dim": 2})]),
]
_USUAL = {1, 7, 9}


@pytest.mark.parametrize(
    ("sources", "targets", "operations"),
    [
        pytest.param(*case, marks=() if number in _USUAL else pytest.mark.exhaustive)
        for number, case in enumerate(_OPERATIONS)
    ],
)
def test_each_operation_equals_transformers(
    tmp_path: Path, sources: list[str], targets: list[str], operations: list[Operation]
) -> None:
    """Operations on tensors of two layers, with prefixes and suffixes, equal transformers'."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    heads = 2
    state: dict[str, torch.Tensor] = {}
    for layer in range(2):
        for source in sources:
            for item in range(3) if "*" in source else [0]:
                name = f"model.layers.{layer}.{source.replace('*', str(item))}.weight"
                state[name] = torch.randn(8, 4)
    save_file(state, tmp_path / "in.safetensors")
    (tmp_path / "config.json").write_text(f'{{"num_attention_heads": {heads}}}')
    patterns = [rf"{source}.weight" for source in sources]
    made = [f"{target}.weight" for target in targets]
    expected = made_of(operations)
    converter = WeightConverter(patterns, made, expected)
    renaming = WeightRenaming(r"^model\.", "")
    weights = dcp.transformers_map(tmp_path / "in.safetensors", [renaming, converter])
    assert len(weights.rules) == 1
    dcp.convert(tmp_path / "in.safetensors", tmp_path / "out", to="dcp", map=weights)
    found = dcp.read(tmp_path / "out")
    for layer in range(2):
        parts: dict[str, Any] = {}
        for source, pattern in zip(sources, patterns, strict=True):
            names = [f"model.layers.{layer}.{source.replace('*', str(item))}.weight" for item in range(3)]
            tensors = [state[name] for name in names if name in state]
            parts[pattern] = tensors if "*" in source else tensors[:1]
        for operation in expected:
            parts = operation.convert(
                parts,
                source_patterns=patterns,
                target_patterns=made,
                config=SimpleNamespace(num_attention_heads=heads),
            )
        for name, tensor in parts.items():
            wanted = tensor[0] if isinstance(tensor, list) else tensor
            assert torch.equal(found.pop(f"layers.{layer}.{name}"), wanted)
    assert not found


def made_of(operations: list[Operation]) -> list[Any]:
    """Build operations of transformers, and an unknown one for other names."""
    from transformers import core_model_loading

    class Unheard(core_model_loading.ConversionOps):
        def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return input_dict

    return [getattr(core_model_loading, name, Unheard)(**options) for name, options in operations]


@pytest.mark.parametrize(
    ("operations", "targets", "message"),
    [
        ([("Unheard", {})], ["t"], "w -> t: Unheard"),
        ([("Chunk", {"dim": 0})], ["a", "b", "c"], "unequal sizes"),
        ([("Transpose", {"dim0": 0, "dim1": 1, "check_dims": True})], ["t"], "depends on the model"),
    ],
)
def test_unsupported_operations_are_named(
    tmp_path: Path, operations: list[Operation], targets: list[str], message: str
) -> None:
    """One error names all unsupported operations, before any tensor is read."""
    from transformers.core_model_loading import WeightConverter

    save_file({"w": torch.ones(8, 4)}, tmp_path / "in.safetensors")
    with pytest.raises(PlanError, match="a weight map cannot express") as caught:
        dcp.transformers_map(
            tmp_path / "in.safetensors", [WeightConverter(["w"], targets, made_of(operations))]
        )
    assert message in str(caught.value)
