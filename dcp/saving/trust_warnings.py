"""Warnings about values and keys that a load does not return unchanged.

The coordinator warns during the save, because otherwise the problem would show only in a resume.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from dcp.calls.arguments import is_stateful
from dcp.planners.by_value import by_value
from dcp.storage.formats.container_notes import NO_PLAIN_KEY, plain_key
from dcp.storage.formats.torch.python_values import is_harmless_leaf
from dcp.storage.near_names import listed

logger = logging.getLogger(__name__)

_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Tensor})
_SEQUENCES: Final = frozenset((list, tuple, collections.deque))
_MAPPINGS: Final = frozenset((dict, collections.OrderedDict, collections.Counter, collections.defaultdict))
_TORCH: Final = (torch.Tensor, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_MAX_DEPTH: Final = 64
_MAX_TOLD: Final = 10


def warn_of_foreign(fqns: Sequence[str], values: Sequence[Any], keys: Mapping[str, str]) -> None:
    """Log a warning of values that need a trusted load, and of ``keys`` that no load restores."""
    found = dict[str, str]()
    if not _ATOMS.issuperset(map(type, values)):
        # includes classes registered with torch as safe
        safe = torch.serialization.get_safe_globals()
        allowed = {item[0] if isinstance(item, tuple) else item for item in safe}
        for name, value in zip(fqns, values, strict=True):
            foreign = None if type(value) in _ATOMS else _foreign(by_value(value), allowed, 0)
            if foreign is not None:
                found[name] = foreign
    if found:
        logger.warning(
            "%d of the saved values will load only with weights_only=False, or with their classes in "
            "torch.serialization.add_safe_globals: %s. Save plain data instead to avoid this",
            len(found),
            _listed(found),
        )
        named = zip(fqns, values, strict=True)
        nested = [name for name, value in named if name in found and is_stateful(value)]
        if nested:
            logger.warning(
                "%s: objects with a state_dict() below the top level of the state dict are pickled as a "
                "whole; move them to the top level, or replace them by their state_dict()",
                listed(nested, most=_MAX_TOLD),
            )
    if keys:
        logger.warning(
            "%d keys of dicts are saved as strings only: %s. A load into a state dict with these keys works; "
            "other loads return strings. Keys of numbers, strings, bytes, None and tuples keep their type",
            len(keys),
            _listed(keys),
        )


def _listed(found: Mapping[str, str]) -> str:
    return listed(list(found), most=_MAX_TOLD, show=lambda fqn: f"{fqn!r:.200} ({found[fqn]})")


def _foreign(value: Any, allowed: set[Any], depth: int) -> str | None:
    """Return the class in a value that `torch.load(weights_only=True)` and dcp refuse; None if none."""
    kind = type(value)
    if kind in _ATOMS:
        return None
    if kind in (set, frozenset):
        return _foreign_key(value, allowed)
    if kind in _SEQUENCES:
        return _foreign_in(value, allowed, depth + 1)
    if kind in _MAPPINGS:
        factory = getattr(value, "default_factory", None)
        if factory is not None and getattr(factory, "__module__", None) != "builtins":
            return "collections.defaultdict with a factory"
        return _foreign_key(value, allowed) or _foreign_in(value.values(), allowed, depth + 1)
    if isinstance(value, _TORCH) or is_harmless_leaf(value) or kind in allowed:
        return None
    if isinstance(value, np.ndarray | np.generic | np.dtype):
        return f"numpy.{kind.__name__} of {getattr(value, 'dtype', value)}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _foreign_key(keys: Iterable[Any], allowed: set[Any]) -> str | None:
    """Return the first of ``keys`` that only a trusted load accepts; None if none."""
    for key in keys:
        foreign = _foreign(key, allowed, 0)
        is_known = isinstance(key, _TORCH) or type(key) in allowed
        if foreign is None and plain_key(key) is NO_PLAIN_KEY and not is_known:
            foreign = f"{type(key).__module__}.{type(key).__qualname__}"
        if foreign is not None:
            return f"{foreign} as a key"
    return None


def _foreign_in(items: Iterable[Any], allowed: set[Any], depth: int) -> str | None:
    if depth > _MAX_DEPTH:
        return f"more than {_MAX_DEPTH} levels"
    if _ATOMS.issuperset(map(type, items)):  # quick, for long histories
        return None
    found = (_foreign(item, allowed, depth) for item in items)
    return next((foreign for foreign in found if foreign is not None), None)
