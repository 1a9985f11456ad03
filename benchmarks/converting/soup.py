"""Checkpoints of one model to merge, as fine-tuning produces them."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["WEIGHTS", "save_models", "save_soup"]

WEIGHTS = {"soup": [0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05], "models": [0.25] * 4}
"""Weights of the merged checkpoints, by the name of their folder."""

_TENSOR_BYTES = 32 << 20
_WIDTH = 4096
_MLP_WIDTH = 11264
_VOCABULARY = 8192


def save_soup(folder: Path, size_bytes: float) -> None:
    """Write files of about ``size_bytes`` each in bfloat16, one for each weight."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    rows = max(1, int(min(size_bytes, _TENSOR_BYTES)) // (2 * _WIDTH))
    count = max(1, round(size_bytes / (2 * rows * _WIDTH)))
    for number in range(len(WEIGHTS["soup"])):
        state = {f"layers.{n}.weight": torch.randn(rows, _WIDTH, dtype=torch.bfloat16) for n in range(count)}
        save_file(state, folder / f"{number}.safetensors")


def save_models(folder: Path, size_bytes: float) -> None:
    """Write Llama models of about ``size_bytes`` each in bfloat16 as Hugging Face does, one a weight."""
    import torch
    from safetensors.torch import save_file

    width = _WIDTH if size_bytes > 512 << 20 else 64
    inner, vocabulary = _MLP_WIDTH * width // _WIDTH, _VOCABULARY * width // _WIDTH
    of_layer = 2 * (4 * width * width + 3 * width * inner)
    layers = max(1, round((size_bytes - 4 * vocabulary * width) / of_layer))
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (width,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (vocabulary, width))
    for layer in range(layers):
        before = f"model.layers.{layer}"
        shapes |= {f"{before}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{before}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"{before}.mlp.down_proj.weight"] = (width, inner)
        for name in ("input", "post_attention"):
            shapes[f"{before}.{name}_layernorm.weight"] = (width,)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    for number in range(len(WEIGHTS["models"])):
        model = folder / str(number)
        model.mkdir(parents=True)
        state = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(state, model / "model.safetensors", metadata={"format": "pt"})
        (model / "config.json").write_text(json.dumps(config))
