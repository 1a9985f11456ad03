"""Values of plain-data subclasses, stored as the equal plain data.

An `enum.IntEnum` is an int, an `enum.StrEnum` a str, a named tuple a tuple, `torch.__version__` a str. The
stored data need no class and no trust to load; if the loading state dict has the class, values are
converted back.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch

from dcp.storage.formats.plain import encode_plain

_ATOMS: Final = (int, float, str, bytes)
_EXACT: Final = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Tensor})
_MAX_DEPTH: Final = 64


def by_value(value: Any) -> Any:
    """Convert ``value`` and items of its lists, tuples and dicts to equal plain data; return ``value``
    itself if unchanged.

    Classes registered as safe with torch stay unchanged.
    """
    return _by_value(value, 0, {}) if type(value) not in _EXACT else value


def encode_by_value(value: Any) -> bytes | None:
    """Encode plain data, or a value equal to plain data, with msgpack; None for other values."""
    encoded = encode_plain(value)
    if encoded is None:
        plain = by_value(value)
        encoded = None if plain is value else encode_plain(plain)
    return encoded


def _by_value(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    """Convert a value; ``seen`` has converted containers by identity, for shared and recursive containers."""
    kind = type(value)
    if kind in _EXACT or depth > _MAX_DEPTH:
        return value
    if not isinstance(value, (list, tuple, dict)):
        is_other = isinstance(value, np.generic) or _is_allowed(kind) or not isinstance(value, _ATOMS)
        return value if is_other else _atom(value, kind)
    if id(value) not in seen:
        seen[id(value)] = value
        seen[id(value)] = _container(value, kind, depth + 1, seen)
    return seen[id(value)]


def _container(value: Any, kind: type, depth: int, seen: dict[int, Any]) -> Any:
    if kind in (list, tuple):
        items = [_by_value(item, depth, seen) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else kind(items)
    if kind is dict:
        changed = {key: _by_value(item, depth, seen) for key, item in value.items()}
        return value if all(changed[key] is item for key, item in value.items()) else changed
    if _is_allowed(kind):
        return value
    if isinstance(value, tuple) and _is_named(kind):
        return tuple([_by_value(item, depth, seen) for item in value])
    if isinstance(value, list) and not _has_more(value):
        return [_by_value(item, depth, seen) for item in value]
    return value


def _atom(value: Any, kind: type) -> Any:
    """Return the plain value, unless the object has attributes or a different comparison."""
    if _has_more(value) and not isinstance(value, enum.Enum):
        return value
    base = next(base for base in _ATOMS if issubclass(kind, base))
    plain = base.__str__(value) if base is str else base.__bytes__(value) if base is bytes else base(value)
    return plain if type(plain) is base and plain == value else value


def _has_more(value: Any) -> bool:
    """Return True if an object has attributes beside the value of its base class."""
    slots = any(getattr(base, "__slots__", ()) for base in type(value).__mro__)
    return slots or bool(getattr(value, "__dict__", None))


def _is_named(kind: type) -> bool:
    fields = getattr(kind, "_fields", None)
    return (
        kind.__base__ is tuple and isinstance(fields, tuple) and all(isinstance(name, str) for name in fields)
    )


def _is_allowed(kind: type) -> bool:
    allowed = torch.serialization.get_safe_globals()
    return any((item[0] if isinstance(item, tuple) else item) is kind for item in allowed)


def has_plain_types(types: Iterable[type]) -> bool:
    """Return True if values of ``types`` need no conversion by `like`."""
    return _EXACT.issuperset(types)


def like(current: Any, value: Any) -> Any:
    """Convert ``value``, loaded in place of ``current``, to the class of ``current`` if that stores its
    values as data; also items of lists, tuples and dicts of equal shape.

    The class comes from the caller, not from the checkpoint.
    """
    kind = type(current)
    if kind is type(value):
        return value if kind in _EXACT else _like_inside(current, value)
    if isinstance(current, enum.Enum) and isinstance(current, _ATOMS) and isinstance(value, _ATOMS):
        try:
            member = kind(value)
        except ValueError:  # the class has changed since the save
            return value
        return member if member == value else value
    if type(value) is tuple and isinstance(current, tuple) and _is_named(kind) and len(current) == len(value):
        return kind._make(map(like, current, value))
    if type(value) in _ATOMS and isinstance(current, type(value)) and by_value(current) is not current:
        return type(value).__new__(kind, value)  # like pickle, without code of the class
    if type(value) is list and isinstance(current, list) and by_value(current) is not current:
        made = list.__new__(kind)
        list.extend(made, _like_inside([*current], value))
        return made
    return value


def _like_inside(current: Any, value: Any) -> Any:
    """Apply `like` to the items of lists, tuples and dicts of equal shape; return ``value`` itself if
    unchanged.
    """
    if type(value) not in (dict, list, tuple):
        return value
    if _EXACT.issuperset(map(type, current.values() if isinstance(current, dict) else current)):
        return value
    if type(value) is dict:
        changed = {key: like(current[key], item) if key in current else item for key, item in value.items()}
        return value if all(changed[key] is item for key, item in value.items()) else changed
    if len(value) != len(current):
        return value
    items = [*map(like, current, value)]
    same = all(new is old for new, old in zip(items, value, strict=True))
    return value if same else type(value)(items)
