"""What integrations of trainers share: a model's state, and looks at the storage that all ranks act upon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import torch.distributed as dist
from torch import nn

from dcp.ranks.collectives import Ranks
from dcp.ranks.exchanges import DEFAULT_TIMEOUT_SECONDS
from dcp.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

__all__ = ["load_model_state", "model_state", "on_first_rank"]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What compilation and activation checkpointing put into names of parameters."""


def model_state(model: nn.Module) -> dict[str, Any]:
    """All of ``model``'s state; with PEFT adapters, all of them whole and what else is not frozen, alone.

    Names do not depend on compilation or FSDP; ``model`` has no DDP around it. Tensors are the model's own.
    """
    state: dict[str, Any] = get_model_state_dict(model)
    adapters = {name for module in model.modules() for name in getattr(module, "peft_config", None) or ()}
    if not adapters:
        return state
    # Tied weights are there under each of their names.
    named = model.named_parameters(remove_duplicate=False)
    frozen = {_plain(name) for name, parameter in named if not parameter.requires_grad}
    return {
        name: value for name, value in state.items() if name not in frozen or adapters & {*name.split(".")}
    }


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Give ``model`` what a load has filled of `model_state`; what that leaves out stays as it is."""
    set_model_state_dict(model, state, options=StateDictOptions(strict=False))


def on_first_rank(look: Callable[[], Any]) -> Any:
    """What ``look`` finds on rank 0, on all ranks; plain data. Its error is raised on all, too."""
    together = dist.is_available() and dist.is_initialized()
    ranks = Ranks(None, use_dist=together, timeout_seconds=DEFAULT_TIMEOUT_SECONDS, operation="load")
    packed = ranks.broadcast("look", lambda: bytes(msgpack.packb(look())))
    return msgpack.unpackb(packed)


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
