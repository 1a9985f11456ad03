"""Built-in weight maps on small models of transformers: conversion and back."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcp
from dcp.errors import PlanError
from tests.support.conversion import command

_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _DECODER),
    "llama-tied": ("Llama", {**_DECODER, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**_DECODER, "sliding_window": 8}),
    "qwen2": ("Qwen2", _DECODER),
    "gemma": ("Gemma", {**_DECODER, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**_DECODER, "head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", {**_DECODER, **_EXPERTS, "head_dim": 16}),
    "qwen3-moe-and-dense": (
        "Qwen3Moe",
        {**_DECODER, **_EXPERTS, "head_dim": 16, "num_hidden_layers": 4, "decoder_sparse_step": 2}
        | {"mlp_only_layers": [3]},  # of these layers only the second has experts
    ),
    "mixtral": ("Mixtral", {**_DECODER, "num_local_experts": 4}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": 37}),
    "deepseek": (
        "DeepseekV3",
        {
            **_DECODER,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
}
_CASES = [
    ("llama", "llama:hf-to-titan"),
    ("llama-tied", "llama:hf-to-titan"),
    ("llama-tied", "llama:hf-to-meta"),
    ("mistral", "llama:hf-to-titan"),
    ("llama", "llama:hf-to-megatron"),
    ("mistral", "llama:hf-to-megatron"),
    ("qwen2", "llama:hf-to-megatron"),
    ("gemma", "llama:hf-to-megatron"),
    ("qwen3", "qwen3:hf-to-titan"),
    ("qwen3", "qwen3:hf-to-megatron"),
    ("qwen3-moe", "qwen3:hf-to-titan"),
    ("qwen3-moe", "qwen3:hf-to-megatron"),
    ("qwen3-moe-and-dense", "qwen3:hf-to-titan"),
    ("qwen3-moe-and-dense", "qwen3:hf-to-megatron"),
    ("mixtral", "mixtral:hf-to-megatron"),
    ("gpt2", "gpt2:hf-to-megatron"),
    ("deepseek", "deepseek-v3:hf-to-titan"),
]
_USUAL = [("llama-tied", "llama:hf-to-titan"), ("qwen3-moe-and-dense", "qwen3:hf-to-megatron")]


def outputs_of(model: Any) -> torch.Tensor:
    """Return the logits of some tokens."""
    with torch.no_grad():
        found = model(torch.arange(12).view(2, 6)).logits
    assert isinstance(found, torch.Tensor)
    return found


def check_megatron_layers(model: Any, names: Collection[str]) -> None:
    """Assert for each layer that the norm before experts has its own name if the layer has experts, and that
    all experts are present."""
    for number, layer in enumerate(model.base_model.layers if hasattr(model, "model") else ()):
        own = f"decoder.layers.{number}"
        experts = getattr(getattr(layer.mlp, "experts", None), "num_experts", 0)
        assert (f"{own}.pre_mlp_layernorm.weight" in names) == bool(experts)
        assert (f"{own}.mlp.linear_fc1.layer_norm_weight" in names) == (not experts)
        assert sum(name.startswith(f"{own}.mlp.experts.linear_fc2") for name in names) == experts


@pytest.mark.parametrize(
    ("model", "name"),
    [pytest.param(*case, marks=() if case in _USUAL else pytest.mark.exhaustive) for case in _CASES],
)
def test_a_model_survives_map_and_inverse(
    tmp_path: Path, model: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Through map and inverse each tensor is equal bit for bit, and `from_pretrained` has equal outputs."""
    import transformers  # slow import: not while tests are collected

    family, sizes = _MODELS[model]
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    build: Any = transformers.AutoModelForCausalLM.from_config
    made = build(config, dtype=torch.float32).eval()
    for parameter in made.parameters():  # new norms and biases are all equal
        torch.nn.init.normal_(parameter, std=0.05)
    made.save_pretrained(tmp_path / "hf")
    dcp.convert(tmp_path / "hf", tmp_path / "mapped", to="dcp", map=name)
    if name.endswith("hf-to-megatron"):
        check_megatron_layers(made, dcp.read(tmp_path / "mapped").keys())
    if "routed" in "".join(dcp.read(tmp_path / "mapped")):  # stacked experts
        with pytest.raises(PlanError, match="the checkpoint has 3 of expert, expected 4"):
            dcp.convert(tmp_path / "hf", tmp_path / "3", to="dcp", map=name, exclude="*.experts.3.*")
    weights = dcp.weight_map(name, tmp_path / "hf", inverse=True)
    assert "for models of type" not in caplog.text
    dcp.convert(tmp_path / "mapped", tmp_path / "back" / "model.safetensors", to="safetensors", map=weights)
    before, after = (
        load_file(tmp_path / "hf/model.safetensors"),
        load_file(tmp_path / "back/model.safetensors"),
    )
    for key, tensor in before.items():
        assert torch.equal(tensor, after.pop(key)), key
    assert not after
    config.save_pretrained(tmp_path / "back")
    again = type(made).from_pretrained(tmp_path / "back").eval()
    assert torch.equal(outputs_of(made), outputs_of(again))


def test_each_ready_map_is_tested() -> None:
    """Each built-in map has a test with a model."""
    assert {name for _, name in _CASES} == command("map", "ls", "--json").json.keys()
