"""The top level of a state dict: `Stateful` objects and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcp.storage.errors import OptionError

__all__ = ["check_top_level", "is_stateful", "stateful_keys", "stateful_to_plain"]

_PLAIN_TYPES = frozenset({dict, list, tuple, str, bytes, int, float, bool, type(None)})


def is_stateful(value: Any) -> bool:
    """Whether ``value`` has the `Stateful` protocol.

    Asking a runtime protocol costs 20 microseconds an object, so tensors and plain data, which never have
    it, are told apart first.
    """
    kind = type(value)
    return kind not in _PLAIN_TYPES and _may_be_stateful(kind) and isinstance(value, Stateful)


def check_top_level(state_dict: Any) -> None:
    """Raise PlanError for what has no entries: a module, an optimizer, a list."""
    if isinstance(state_dict, Mapping) or hasattr(state_dict, "items"):
        return
    name = type(state_dict).__name__
    way = (
        f'put the {name} into one, {{"model": ...}}' if is_stateful(state_dict) else "give names to its parts"
    )
    raise OptionError(f"a state dict is wanted, a dict by names, not a {name}: {way}")


def _may_be_stateful(cls: type) -> bool:
    return cls not in _PLAIN_TYPES and not issubclass(cls, torch.Tensor)


def stateful_keys(keys: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Those of ``keys``, in order, that have a `Stateful` in ``values``: asked by class, as there may be many
    thousands of values."""
    classes = set(filter(_may_be_stateful, set(map(type, values))))
    pairs = zip(keys, values, strict=True) if classes else ()
    return [key for key, value in pairs if type(value) in classes and isinstance(value, Stateful)]


def stateful_to_plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` with what each `Stateful` of the top level gives as its state.

    Raises PlanError for what is no dict.
    """
    check_top_level(state_dict)
    if not any(map(_may_be_stateful, set(map(type, state_dict.values())))):
        return dict(state_dict)
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state_dict.items()}
