"""The top level of a state dict: `Stateful` objects and what they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["is_stateful"]

_PLAIN_TYPES = frozenset({dict, list, tuple, str, bytes, int, float, bool, type(None)})


def is_stateful(value: Any) -> bool:
    """Whether ``value`` has the `Stateful` protocol.

    Asking a runtime protocol costs 20 microseconds an object, so tensors and plain data, which never have
    it, are told apart first.
    """
    if type(value) in _PLAIN_TYPES or isinstance(value, torch.Tensor):
        return False
    return isinstance(value, Stateful)
