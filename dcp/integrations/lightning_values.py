"""A checkpoint of Lightning's as `dcp.save` stores it without loss, and back.

A state dict is opened at every dict and list, so that each tensor has a name. A container of another class
(a defaultdict, OmegaConf's), an object with a ``state_dict()``, or a dict whose keys would collide as names,
is stored as one value in a tuple; an OrderedDict is noted, with the ``_metadata`` of a module's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from dcp.planners.per_rank import PerRank
from dcp.storage.formats.container_notes import NO_PLAIN_KEY, plain_key

__all__ = ["opened", "sealed"]

_FORM = "dcp_form"
_VERSIONS = "_metadata"
"""Of a module's state dict: the versions of its classes."""

_Keys = tuple[Any, ...]


def sealed(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved for a checkpoint; nothing of it is changed."""
    form: dict[str, list[Any]] = {"sealed": [], "ordered": []}
    state = {key: _seal(value, (key,), form) for key, value in checkpoint.items()}
    return {**state, _FORM: (form,)}


def opened(state: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint that was `sealed`; ``state`` is taken for it."""
    (form,) = state.pop(_FORM, ({"sealed": [], "ordered": []},))
    for keys in form["sealed"]:
        holder = _at(state, keys[:-1])
        (holder[keys[-1]],) = holder[keys[-1]]
    for keys, versions in sorted(form["ordered"], key=lambda noted: -len(noted[0])):  # the innermost first
        holder = _at(state, keys[:-1])
        ordered: Any = OrderedDict(holder[keys[-1]])
        if versions is not None:
            ordered._metadata = versions
        holder[keys[-1]] = ordered
    return state


def _seal(value: Any, keys: _Keys, form: dict[str, list[Any]]) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if type(value) in (dict, OrderedDict) and _are_names(value):
        if type(value) is OrderedDict:
            form["ordered"].append((keys, getattr(value, _VERSIONS, None)))
        return {key: _seal(entry, (*keys, key), form) for key, entry in value.items()}
    if type(value) is list:
        return [_seal(entry, (*keys, position), form) for position, entry in enumerate(value)]
    if isinstance(value, Mapping | list | PerRank) or hasattr(value, "state_dict"):
        form["sealed"].append(keys)
        return (value,)
    return value


def _are_names(mapping: Mapping[Any, Any]) -> bool:
    """Whether each key can be a part of a name, and no two names are one."""
    if any(plain_key(key) is NO_PLAIN_KEY for key in mapping):
        return False
    names = Counter(map(str, mapping))
    return len(names) == len(mapping) and not any(
        name[:end] in names for name in names for end in range(len(name)) if name[end] == "."
    )


def _at(state: Any, keys: _Keys) -> Any:
    for key in keys:
        state = state[key]
    return state
