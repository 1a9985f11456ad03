"""Nested state dicts to flat ones and back, with the keys that stock torch gives them.

Mappings are opened at every level, lists only where they hold a tensor, a mapping or such a list; tuples
never. A flat key is the path joined by dots. torch before 2.4 opened mappings by the rule of lists only; that
variant (`legacy=True`) finds the entries of checkpoints from then. `PerRank` is opened like a mapping of one
key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dcp.planners.per_rank import PerRank, rank_key
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import Path

__all__ = [
    "LIST",
    "MAPPING",
    "OTHER",
    "PER_RANK",
    "TENSOR",
    "flatten_state_dict",
    "is_closed_list",
    "kind_of",
    "replace_element",
    "set_element",
    "unflatten",
]

OTHER, TENSOR, MAPPING, LIST, PER_RANK = range(5)
"""Kinds of values: how flattening treats them depends on these alone, and for lists on what is in them."""
_MAX_LISTED = 10


def _kind_of(cls: type) -> int:
    if issubclass(cls, torch.Tensor):
        return TENSOR
    if issubclass(cls, Mapping):
        return MAPPING
    if issubclass(cls, list):
        return LIST
    return PER_RANK if issubclass(cls, PerRank) else OTHER


class _Kinds(dict[type, int]):
    """Kind by class, found once a class: isinstance with an abstract class costs more than all the rest."""

    def __missing__(self, cls: type) -> int:
        kind = self[cls] = _kind_of(cls)
        return kind


_KINDS = _Kinds()


def kind_of(cls: type) -> int:
    """The kind of values of a class."""
    return _KINDS[cls]


def is_closed_list(entries: list[Any]) -> bool:
    """Whether flattening keeps a list as one value."""
    return _Flattener(0, legacy=False).closed(entries)


class _Flattener:
    def __init__(self, rank: int, *, legacy: bool) -> None:
        self.rank = rank
        self.legacy = legacy
        self.kinds = _KINDS
        self.flat: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.duplicates: list[str] = []

    def visit(self, fqn: str, path: Path, value: Any) -> None:
        kind = self.kinds[type(value)]
        if kind == PER_RANK:
            key = rank_key(self.rank)
            self.visit(f"{fqn}.{key}", (*path, key), value.value)
        elif kind == MAPPING and not (self.legacy and self.closed(value.values())):
            self.visit_all(f"{fqn}.", path, value)
        elif kind == LIST and not self.closed(value):
            for position, entry in enumerate(value):
                self.visit(f"{fqn}.{position}", (*path, position), entry)
        elif fqn in self.flat:
            self.duplicates.append(fqn)
        else:
            self.flat[fqn] = value
            self.paths[fqn] = path

    def visit_all(self, prefix: str, path: Path, mapping: Mapping[Any, Any]) -> None:
        """The entries of a mapping at ``path``; their keys begin with ``prefix``."""
        kinds, flat, paths = self.kinds, self.flat, self.paths
        for key, entry in mapping.items():
            name = str(key)
            fqn = prefix + name
            # the common case, inlined: a model has many thousands of tensors
            if kinds[type(entry)] == TENSOR and fqn not in flat:
                flat[fqn] = entry
                paths[fqn] = (*path, name)
            else:
                self.visit(fqn, (*path, name), entry)

    def closed(self, entries: Iterable[Any]) -> bool:
        """True when a container of these entries is kept as one value."""
        kinds = self.kinds
        for entry in entries:
            kind = kinds[type(entry)]
            if kind in (TENSOR, PER_RANK):
                return False
            if kind == MAPPING and not (self.legacy and self.closed(entry.values())):
                return False
            if kind == LIST and not self.closed(entry):
                return False
        return True


def flatten_state_dict(
    state_dict: Mapping[Any, Any], *, rank: int = 0, legacy: bool = False
) -> tuple[dict[str, Any], dict[str, Path]]:
    """(values by flat key, paths by flat key), in the order of the state dict.

    ``rank`` names the entries below `PerRank`. ``legacy`` gives the keys of torch 2.3 and before.
    Raises PlanError when two paths give one flat key.
    """
    flattener = _Flattener(rank, legacy=legacy)
    flattener.visit_all("", (), state_dict)
    if flattener.duplicates:
        names = sorted(set(flattener.duplicates))
        raise PlanError(
            f"{len(names)} flattened keys stand for more than one entry of the state dict: "
            f"{_listed(names)}; rename one of each (a dict key with a dot in it can collide with nesting)",
            fqns=names[:_MAX_LISTED],
        )
    return flattener.flat, flattener.paths


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


def _extend(entries: list[Any], position: int) -> None:
    entries.extend([None] * (position + 1 - len(entries)))


def _step(container: Any, key: str | int, default: Callable[[], Any]) -> Any:
    """The child of ``container`` at ``key``, made by ``default`` where there is none."""
    if isinstance(container, PerRank):
        if container.value is None:
            container.value = default()
        return container.value
    if isinstance(container, Mapping):
        return container.setdefault(key, default()) if key not in container else container[key]  # type: ignore[attr-defined]
    if not isinstance(key, int):
        raise PlanError(f"path component {key!r} does not fit into a {type(container).__name__}", key=key)
    _extend(container, key)
    if container[key] is None:
        container[key] = default()
    return container[key]


def _put(container: Any, key: str | int, value: Any) -> None:
    if isinstance(container, PerRank):
        container.value = value
        return
    if isinstance(key, int) and isinstance(container, list):
        _extend(container, key)
    try:
        container[key] = value
    except TypeError as error:
        raise PlanError(
            f"the state dict holds a {type(container).__name__} where a value has to be put under {key!r}; "
            "use a dict or a list there",
            key=key,
        ) from error


def set_element(root: Any, path: Path, value: Any) -> None:
    """Put ``value`` at ``path`` below ``root``, making dicts (str keys) and lists (int positions) on the
    way."""
    container = root
    for key, following in itertools.pairwise(path):
        container = _step(container, key, dict if isinstance(following, str) else list)
    _put(container, path[-1], value)


def _original_key(container: Any, key: str | int) -> Any:
    """The key of a mapping that flattening turned into the string ``key``: optimizers count in ints."""
    if not isinstance(container, Mapping) or key in container:
        return key
    if isinstance(key, str) and key.lstrip("-").isdecimal() and int(key) in container:
        return int(key)
    return next((candidate for candidate in container if str(candidate) == key), key)


def replace_element(root: Any, path: Path, value: Any) -> None:
    """Put ``value`` where `flatten_state_dict` found ``path``.

    As `set_element`, but an existing key that is no string (``state[0]`` of an optimizer) is found again
    rather than shadowed by its string.
    """
    container = root
    for key, following in itertools.pairwise(path):
        original = _original_key(container, key)
        container = _step(container, original, dict if isinstance(following, str) else list)
    _put(container, _original_key(container, path[-1]), value)


def unflatten(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """The nested state dict of flat values and their paths."""
    nested: dict[str, Any] = {}
    for fqn, value in flat.items():
        set_element(nested, paths[fqn], value)
    return nested
