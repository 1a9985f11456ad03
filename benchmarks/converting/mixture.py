"""A mixture of experts in the layout of Hugging Face files: one tensor per expert."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

__all__ = ["save_mixture"]

_EXPERTS = 8
_HEADS, _KEY_HEADS = 16, 8
_SHARD_BYTES = 512 << 20


def save_mixture(folder: Path, size_bytes: float) -> None:
    """Write about ``size_bytes`` of Mixtral tensors in bfloat16, ``config.json``, and the weight map to
    the stacked layout of transformers beside the folder."""
    import torch
    from safetensors.torch import save_file

    from dcp.conversion.transformers_maps import transformers_map

    width = 1024 if size_bytes > 256 << 20 else 64
    inner = 7 * width // 2
    of_layer = 2 * 3 * _EXPERTS * width * inner
    layers = max(1, round(size_bytes / of_layer))
    folder.mkdir()
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KEY_HEADS,
        "num_local_experts": _EXPERTS,
        "vocab_size": 512,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}

    def write() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in _shapes(layers, width, inner):
        shard[name] = torch.randn(shape, dtype=torch.bfloat16)
        if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES:
            write()
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    folder.with_suffix(".json").write_text(json.dumps(transformers_map(folder).data))


def _shapes(layers: int, width: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    key_width = width // _HEADS * _KEY_HEADS
    yield "model.embed_tokens.weight", (512, width)
    for layer in range(layers):
        before = f"model.layers.{layer}"
        for name, rows in (("q", width), ("k", key_width), ("v", key_width), ("o", width)):
            yield f"{before}.self_attn.{name}_proj.weight", (rows, width)
        yield f"{before}.block_sparse_moe.gate.weight", (_EXPERTS, width)
        for expert in range(_EXPERTS):
            own = f"{before}.block_sparse_moe.experts.{expert}"
            yield f"{own}.w1.weight", (inner, width)
            yield f"{own}.w3.weight", (inner, width)
            yield f"{own}.w2.weight", (width, inner)
        yield f"{before}.input_layernorm.weight", (width,)
        yield f"{before}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (512, width)
