"""Conversions through a weight map: streamed, exact, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

import dcp
from dcp.cli.app import app
from dcp.storage.errors import CorruptCheckpointError, PlanError

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as transformers writes it."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=37,
        head_dim=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    made.bfloat16()
    made.save_pretrained(folder)
    return folder


def of_folder(folder: Path) -> State:
    """The tensors of a folder of safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def equal(one: State, other: State) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["llama:hf-to-titan", "llama:hf-to-megatron"])
@pytest.mark.parametrize("options", [{"to": "dcp"}, {"to": "dcp", "files": 3, "chunks": "split"}])
def test_there_and_back(model: Path, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Through our own format in one chunk a tensor and in several, and back to what transformers loads."""
    dcp.convert(model, tmp_path / "mapped", map=name, **options)
    weights = dcp.weight_map(name, model, inverse=True)
    dcp.convert(tmp_path / "mapped", tmp_path / "back", to="safetensors", map=weights)
    assert equal(of_folder(model), of_folder(tmp_path / "back"))


def test_rotary_halves_become_pairs(model: Path, tmp_path: Path) -> None:
    """As Meta's own conversion permutes them, in a file that torch.load reads."""
    dcp.convert(model, tmp_path / "titan.pt", to="torch", map="llama:hf-to-titan", dtype="float32")
    made = torch.load(tmp_path / "titan.pt", weights_only=True)
    query = of_folder(model)["model.layers.1.self_attn.q_proj.weight"]
    wanted = query.view(4, 2, 8, 48).transpose(1, 2).reshape(64, 48).float()
    assert torch.equal(made["layers.1.attention.qkv_linear.wq.weight"], wanted)


def test_what_is_sharded_is_fused_and_padded(tmp_path: Path) -> None:
    """Of chunks that do not end where heads do; what is added is zeros."""
    state = {name: torch.arange(70.0).view(10, 7) + 100 * at for at, name in enumerate("qkv")}
    save_file(state, tmp_path / "in.safetensors")
    dcp.convert(tmp_path / "in.safetensors", tmp_path / "in", to="dcp", files=3, chunks="split")
    fused = {
        "rules": [
            {
                "from": {"q": "(two q) width", "k": "(two k) width", "v": "(two v) width"},
                "to": {"qkv": "width (two (q + k + v) + pad)"},
                "padding": ["pad"],
            }
        ],
        "sizes": {"two": 2, "pad": 5, "q": 5, "k": 5, "v": 5},
    }
    dcp.convert(tmp_path / "in", tmp_path / "out.safetensors", to="safetensors", map=fused)
    (made,) = load_file(tmp_path / "out.safetensors").values()
    parts = [state[name].view(2, 5, 7) for name in "qkv"]
    wanted = torch.cat(parts, dim=1).reshape(30, 7).T
    assert torch.equal(made, torch.cat([wanted, torch.zeros(7, 5)], dim=1))
    dcp.convert(
        tmp_path / "out.safetensors",
        tmp_path / "back.pt",
        to="torch",
        map=dcp.weight_map(fused, inverse=True),
    )
    assert equal(torch.load(tmp_path / "back.pt", weights_only=True), state)


def test_a_damaged_source_is_noticed(model: Path, tmp_path: Path) -> None:
    """Though what is read is permuted."""
    dcp.convert(model, tmp_path / "dcp", to="dcp")
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    weights = dcp.weight_map("llama:hf-to-titan", model)
    with pytest.raises(CorruptCheckpointError):
        dcp.convert(tmp_path / "dcp", tmp_path / "out", to="safetensors", map=weights)
    assert not (tmp_path / "out").exists()


def test_names_that_no_rule_knows_are_told_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    """All of them; what is chosen is chosen first."""
    weights = {"rules": [{"from": "lm_head.weight", "to": "head"}]}
    with pytest.raises(PlanError, match=r"no rule knows 'model\.embed_tokens\.weight'"):
        dcp.convert(model, tmp_path / "out", to="dcp", map=weights)
    assert not (tmp_path / "out").exists()
    dcp.convert(model, tmp_path / "out", to="dcp", map=weights, only="lm_head.*")
    assert list(dcp.read(tmp_path / "out")) == ["head"]


def test_sizes_that_nobody_said_are_asked_for(model: Path, tmp_path: Path) -> None:
    """A sharded checkpoint has no configuration beside it."""
    dcp.convert(model, tmp_path / "dcp", to="dcp")
    with pytest.raises(PlanError, match=r"sizes of heads and half .* config\.json, or the sizes themselves"):
        dcp.convert(tmp_path / "dcp", tmp_path / "out", to="torch", map="llama:hf-to-titan")
    weights = dcp.weight_map("llama:hf-to-titan", num_attention_heads=4, num_key_value_heads=2)
    dcp.convert(tmp_path / "dcp", tmp_path / "out.pt", to="torch", map=weights)


def test_the_command_line(model: Path, tmp_path: Path) -> None:
    """Maps are listed, checked and used there, and back."""
    assert "llama:hf-to-titan" in run("map", "ls").stdout
    checked = run("map", "check", "llama:hf-to-titan", str(model))
    assert checked.exit_code == 0
    assert "layers.1.attention.qkv_linear.wq.weight" in checked.stdout
    wrong = run("map", "check", "llama:hf-to-titan", str(model), "--inverse")
    assert wrong.exit_code == 1
    assert "no rule knows" in wrong.stdout
    there = run("convert", str(model), str(tmp_path / "titan"), "--to", "dcp", "--map", "llama:hf-to-titan")
    assert there.exit_code == 0, there.output
    options = ["--map", "llama:hf-to-titan", "--inverse", "--config", str(model), "--set", "two=2"]
    back = run("convert", str(tmp_path / "titan"), str(tmp_path / "back"), "--to", "safetensors", *options)
    assert back.exit_code == 0, back.output
    assert equal(of_folder(model), of_folder(tmp_path / "back"))


def run(*arguments: str) -> Result:
    """`dcp` in this process."""
    return CliRunner().invoke(app, arguments)
