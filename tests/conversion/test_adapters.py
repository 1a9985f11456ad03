"""Merges of peft adapters into their base, compared with peft's merge; test_numbers compares bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp
from dcp.errors import CheckpointFormatError, PlanError, UnsupportedFormatError
from tests.support.conversion import command, names_in, write_adapter

# The tests import these themselves: slow imports, not while tests are collected.
if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    """Return a model of two layers, or a smaller one with the output tied to the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    if tied:
        sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=37, tie_word_embeddings=tied, **sizes, **heads))


def gpt2() -> GPT2LMHeadModel:
    """Return a model with `Conv1D` layers, one of them square."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=41, n_positions=16))


def save_adapter(model: Any, folder: Path, seed: int = 1, **config: Any) -> None:
    """Save an adapter with random factors, as after training: neither factor is 0."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(**config))
    torch.manual_seed(seed)
    for name, value in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.3)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)


_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (llama, {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
    "stabilised": (llama, {"r": 9, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"}),
    "patterns": (
        llama,
        {
            "r": 4,
            "target_modules": ["q_proj", "up_proj"],
            "rank_pattern": {"up_proj": 2, "layers.1.self_attn.q_proj": 7},
            "alpha_pattern": {"layers.0.mlp.up_proj": 3},
        },
    ),
    "expressions": (
        llama,
        {
            "r": 4,
            "target_modules": r".*\.(q|up)_proj",
            "rank_pattern": {r"model\.layers\.[1-9]\d*\..*_proj": 2, r"^model.*\.0\.self_attn.*q_proj": 7},
            "alpha_pattern": {r"mlp\.(gate|up)_proj": 3, r".*\.self_attn\..+": 5},
        },
    ),
    "embeddings": (llama, {"r": 3, "target_modules": ["embed_tokens", "lm_head"]}),
    "conv1d": (gpt2, {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("stabilised", "conv1d") else pytest.mark.exhaustive)
        for case in _CONFIGS
    ],
)
def test_merged_adapters_equal_pefts(tmp_path: Path, case: str) -> None:
    """All weights, targeted or not, and the outputs of the model equal peft's merge."""
    from peft import PeftModel

    make, config = _CONFIGS[case]
    make().save_pretrained(tmp_path / "base")
    save_adapter(make(), tmp_path / "adapter", **config)
    peft = PeftModel.from_pretrained(make(), tmp_path / "adapter").merge_and_unload()
    expected = peft.state_dict()
    options = ["--adapter", tmp_path / "adapter", "--hf", tmp_path / "base", "--executor", "inline"]
    done = command("merge", tmp_path / "base", "-o", tmp_path / "out", *options)
    assert done.status == 0, done.err
    made, base = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "base/model.safetensors")
    assert made.keys() == base.keys()
    changed = 0
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)
        changed += not torch.equal(tensor, base[name])
    assert changed >= 2
    tokens = torch.arange(10).view(1, -1)
    loaded = make().from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = loaded(tokens).logits, peft.eval()(tokens).logits
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens", "lm_head"]])
def test_an_adapter_of_tied_weights_is_refused(tmp_path: Path, modules: list[str]) -> None:
    """An adapter of one tied weight would change the other as well: an error, also if only the target's
    configuration ties them. Without a configuration the two become separate weights. An adapter of both with
    tying is merged into both."""
    llama(tied=True).save_pretrained(tmp_path / "base")
    torch.save(llama(tied=True).state_dict(), tmp_path / "base.pt")
    save_adapter(llama(tied=True), tmp_path / "adapter", r=2, target_modules=modules)
    adapter: dict[str, Any] = {"adapters": [tmp_path / "adapter"], "executor": "inline"}
    out = tmp_path / "out"
    for source, hf in ((tmp_path / "base", None), (tmp_path / "base.pt", tmp_path / "base")):
        with pytest.raises(PlanError, match=r"is tied to the other embedding .*untied embeddings"):
            dcp.merge([source], out, to="safetensors", hf=hf, **adapter)
    dcp.merge([tmp_path / "base.pt"], tmp_path / "out.pt", **adapter)
    made, base = torch.load(tmp_path / "out.pt"), llama(tied=True).state_dict()
    changed = {name for name in base if not torch.equal(made[name], base[name])}
    names = {"lm_head": "lm_head.weight", "embed_tokens": "model.embed_tokens.weight"}
    assert changed == {names[module] for module in modules}
    if len(modules) == 1:
        return
    from peft import PeftModel

    save_adapter(llama(tied=True), tmp_path / "both", r=2, target_modules=modules, ensure_weight_tying=True)
    dcp.merge([tmp_path / "base"], out, hf=tmp_path / "base", adapters=[tmp_path / "both"], executor="inline")
    tokens = torch.arange(10).view(1, -1)
    peft = PeftModel.from_pretrained(llama(tied=True), tmp_path / "both").eval()
    with torch.no_grad():
        loaded: Any = llama(tied=True).from_pretrained(out)
        logits = peft(tokens).logits, loaded.eval()(tokens).logits
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


_PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
_FACTORS = {"m.lora_A.weight": torch.ones(2, 5), "m.lora_B.weight": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "adapters of the type 'IA3'"),
        ({"modules_to_save": ["head"]}, "fully saved modules"),
        ({"init_lora_weights": "pissa"}, "changed by init_lora_weights='pissa'"),
        ({"rank_pattern": {"(a+)+b": 3}}, "in the pattern"),
        ({"use_dora": True, "bias": "all"}, "DoRA; bias 'all'"),
        ({"r": 0}, "r must be a whole number above 0, not 0"),
        ({"rank_pattern": {f"m{number}": 2 for number in range(10_001)}}, "more than 10000 patterns"),
        ({"lora_alpha": 1e999}, "adapter_config"),
        ({"r": 3}, "has rank 2, but the configuration says 3"),
    ],
)
def test_unsupported_configurations_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    """One error names all unsupported settings of a configuration, before any file is written."""
    save_file({"m.weight": torch.ones(3, 5)}, tmp_path / "base.safetensors")
    write_adapter(tmp_path / "lora", _PLAIN | config, _FACTORS)
    with pytest.raises((UnsupportedFormatError, CheckpointFormatError), match=words.replace("(", r"\(")):
        dcp.merge([tmp_path / "base.safetensors"], tmp_path / "out", adapters=[tmp_path / "lora"])
    assert names_in(tmp_path) == ["base.safetensors", "lora"]
