"""Megatron's own GPT, tensor parallel on the CPU, with its own sharded state of model and optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

__all__ = ["gpt_training"]

VOCABULARY, LENGTH = 32, 8


def gpt_training(rank: int, ranks: int, folder: Path, options: Mapping[str, Any]) -> list[float]:
    """Train up to ``steps`` on all ranks as one tensor parallel group, from the newest iteration on, saving
    each second; the losses. With ``die_at`` rank 0 is killed in its so many-th save."""
    from megatron.core import dist_checkpointing, parallel_state

    import dcp.integrations.megatron
    from tests.support.dying import die_in_commit

    dcp.integrations.megatron.use()
    parallel_state.initialize_model_parallel(ranks)
    model = _model(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 0 and options.get("die_at"):
        die_in_commit(options["die_at"])
    tracker, losses, first = folder / "latest", [], 1
    if tracker.exists():
        first = int(tracker.read_text()) + 1
        for parameter in model.parameters():  # a step, so that there is a state to load into
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        place = folder / f"iter_{first - 1:07d}"
        loaded = dist_checkpointing.load(_state(model, optimizer, 0), str(place))
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        assert loaded["iteration"] == first - 1
    for step in range(first, options["steps"] + 1):
        losses.append(_step(model, optimizer, step))
        if step % 2 == 0:
            place = folder / f"iter_{step:07d}"
            place.mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(_state(model, optimizer, step), str(place))
            tracker.write_text(json.dumps(step))
    return losses


def _model(ranks: int) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()  # CUDA's generators
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)


def _step(model: Any, optimizer: Any, step: int) -> float:
    tokens = (torch.arange(2 * LENGTH).view(2, LENGTH) * 3 + step) % VOCABULARY
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(2, 1, LENGTH, LENGTH).triu(1).bool()
    loss = model(tokens, positions, mask, labels=(tokens + 3) % VOCABULARY).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _state(model: Any, optimizer: Any, iteration: int) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    sharded = model.sharded_state_dict()
    state = optimizer.state_dict()
    parameters = get_param_id_to_sharded_param_map(sharded, model.parameters())
    optim_state_to_sharding_state(state, parameters)
    return {"model": sharded, "optimizer": state, "iteration": iteration}
