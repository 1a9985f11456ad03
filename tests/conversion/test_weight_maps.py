"""Conversions through a weight map: streamed, exact, and back."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp
from dcp.errors import PlanError
from tests.support.conversion import command

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Llama in transformers' format; test_ready_maps has real models."""
    folder = tmp_path_factory.mktemp("llama")
    shapes = {"model.embed_tokens": (37, 48), "model.norm": (48,), "lm_head": (37, 48)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.self_attn.{name}_proj": (32, 48) for name in "kv"}
        shapes |= {f"{layer}.self_attn.q_proj": (64, 48), f"{layer}.self_attn.o_proj": (48, 64)}
        shapes |= {f"{layer}.mlp.{name}_proj": (80, 48) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (48, 80)}
        shapes |= {f"{layer}.{name}_layernorm": (48,) for name in ("input", "post_attention")}
    torch.manual_seed(0)
    state = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 37}
    config |= {"tie_word_embeddings": False, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_folder(folder: Path) -> State:
    """Return the tensors of a folder of safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def equal(one: State, other: State) -> bool:
    """Compare bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_rotary_halves_become_pairs(model: Path, tmp_path: Path) -> None:
    """Queries are permuted as by Meta's conversion, in a file that torch.load reads."""
    dcp.convert(model, tmp_path / "titan.pt", to="torch", map="llama:hf-to-titan", dtype="float32")
    made = torch.load(tmp_path / "titan.pt", weights_only=True)
    query = of_folder(model)["model.layers.1.self_attn.q_proj.weight"]
    wanted = query.view(4, 2, 8, 48).transpose(1, 2).reshape(64, 48).float()
    assert torch.equal(made["layers.1.attention.qkv_linear.wq.weight"], wanted)


def test_megatron_has_queries_keys_and_values_by_group(model: Path, tmp_path: Path) -> None:
    """Each group has all heads of its queries, then its key and its value; biases are handled as weights."""
    state = {name: tensor for name, tensor in of_folder(model).items() if "self_attn" not in name}
    kinds = {"q": (4, 16), "k": (2, 16), "v": (2, 16)}
    for kind, (heads, size) in kinds.items():
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.{kind}_proj"
            state |= {
                f"{name}.weight": torch.randn(heads * size, 48),
                f"{name}.bias": torch.randn(heads * size),
            }
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path)
    dcp.convert(tmp_path / "model.safetensors", tmp_path / "made", to="dcp", map="llama:hf-to-megatron")
    made = dcp.read(tmp_path / "made")
    for part, rest in (("weight", [48]), ("bias", [])):
        names = [f"model.layers.1.self_attn.{kind}_proj.{part}" for kind in kinds]
        fused = torch.cat([state[name].view(2, -1, 16, *rest) for name in names], dim=1).flatten(0, 2)
        assert torch.equal(made[f"decoder.layers.1.self_attention.linear_qkv.{part}"], fused), part


def test_names_without_a_rule_are_named_before_a_write(model: Path, tmp_path: Path) -> None:
    """The error names all tensors without a rule; only= is applied before the map."""
    weights = {"rules": [{"from": "lm_head.weight", "to": "head"}]}
    with pytest.raises(PlanError, match=r"no rule matches 'model\.embed_tokens\.weight'"):
        dcp.convert(model, tmp_path / "out", to="dcp", map=weights)
    assert not (tmp_path / "out").exists()
    dcp.convert(model, tmp_path / "out", to="dcp", map=weights, only="lm_head.*")
    assert list(dcp.read(tmp_path / "out")) == ["head"]


def test_the_error_asks_for_unknown_sizes(model: Path, tmp_path: Path) -> None:
    """A sharded checkpoint has no configuration, so the error asks for config.json or the sizes."""
    dcp.convert(model, tmp_path / "dcp", to="dcp")
    with pytest.raises(
        PlanError, match=r"sizes of heads and half .* config\.json beside the weights, or sizes"
    ):
        dcp.convert(tmp_path / "dcp", tmp_path / "out", to="torch", map="llama:hf-to-titan")
    weights = dcp.weight_map("llama:hf-to-titan", num_attention_heads=4, num_key_value_heads=2)
    dcp.convert(tmp_path / "dcp", tmp_path / "out.pt", to="torch", map=weights)


def test_maps_on_the_command_line(model: Path, tmp_path: Path) -> None:
    """The command line lists and checks maps, and converts with them in both directions."""
    assert "llama:hf-to-titan" in command("map", "ls").out
    checked = command("map", "check", "llama:hf-to-titan", model)
    assert checked.status == 0
    assert "layers.1.attention.qkv_linear.wq.weight" in checked.out
    wrong = command("map", "check", "llama:hf-to-titan", model, "--inverse")
    assert wrong.status == 1
    assert "no rule matches" in wrong.out and "pass inverse=True" in wrong.out
    first = command("map", "check", "llama:hf-to-titan", model, "--top", "3")
    assert re.search(r"^and \d+ more tensors$", first.out, re.MULTILINE)
    converted = command("convert", model, tmp_path / "titan", "--to", "dcp", "--map", "llama:hf-to-titan")
    assert converted.status == 0, converted.err
    assert dcp.open_index(tmp_path / "titan").provenance["map"] == "llama:hf-to-titan"
    options = ["--map", "llama:hf-to-titan", "--inverse", "--config", model, "--set", "two=2"]
    back = command("convert", tmp_path / "titan", tmp_path / "back", "--to", "safetensors", *options)
    assert back.status == 0, back.err
    assert equal(of_folder(model), of_folder(tmp_path / "back"))


def test_a_model_below_a_key_of_a_training_state(model: Path, tmp_path: Path) -> None:
    """below= applies a map to the model in a training state with an optimizer; the error suggests it."""
    titan, steps, back = tmp_path / "titan", tmp_path / "step", tmp_path / "back"
    dcp.convert(model, titan, to="dcp", map="llama:hf-to-titan")
    dcp.save({"model": dcp.read(titan), "optimizer": {"step": torch.zeros(2)}}, checkpoint_id=steps)
    arguments = ["convert", steps, back, "--to", "safetensors", "--map", "llama:hf-to-titan", "--inverse"]
    wrong = command(*arguments, "--hf", model)
    assert "rules for the names below 'model': pass below=" in wrong.err
    assert not back.exists()
    done = command(*arguments, "--hf", model, "--below", "model", "--only", "model")
    assert done.status == 0, done.err
    assert equal(of_folder(model), of_folder(back))
    inverse_map = dcp.weight_map("llama:hf-to-titan", model, inverse=True, below="model").inverse
    dcp.convert(back, tmp_path / "again", to="dcp", map=inverse_map)
    named = {f"model.{name}": tensor for name, tensor in dcp.read(titan).items()}
    assert equal(dcp.read(tmp_path / "again"), named)
