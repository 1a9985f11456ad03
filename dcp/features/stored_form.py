"""Stored form of states, for `Stateful` objects with less state than the saved ones.

Missing containers and tensors are created with the stored shapes. Parameter names of models and optimizers
stay unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.nn import Module
from torch.optim import Optimizer

from dcp.features.entries import is_optimizer_dict
from dcp.planners.flatten import FACTS, LIST, MAPPING, OTHER, PER_RANK, TENSOR, is_closed, kind_of
from dcp.planners.per_rank import rank_holder, rank_key
from dcp.storage.formats.container_notes import STRUCTURE_VERSION, empty_dicts, notes_by_path
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.tensors import torch_dtype

_NOTHING: Final = object()
_CONTAINERS: Final = (MAPPING, LIST)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the checkpoint; ``shape`` and ``dtype`` are None for values."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


@dataclass(eq=False)
class StoredForm:
    """Stored form of objects in the checkpoint of ``index``, for one rank.

    ``selects`` chooses names (``is_whole``: all), ``renamed`` gives stored names. ``lost`` are names that no
    rank takes. Names of created tensors go to ``made``.
    """

    index: CheckpointIndex
    rank: int
    selects: Callable[[str], bool]
    is_whole: bool
    renamed: Callable[[str], str] | None
    lost: Collection[str]
    made: set[str]

    def fitted(self, key: Any, holder: Any, state: Any) -> Any:
        """Return ``state``, from ``holder`` at top-level ``key``, in the stored form.

        Changed containers are copies. Non-empty dicts and lists receive only entries that no rank takes
        (`_lost`), because other ranks may hold the rest.
        """
        if isinstance(holder, Optimizer):
            return state
        index, top = self.index, str(key)
        known = index.planner_data if isinstance(index.planner_data, Mapping) else {}
        paths = {  # keep the order of the saved state
            name: path
            for name, path in known.items()
            if isinstance(path, tuple)
            and path[:1] == (top,)
            and (name in index.position or name in index.objects.position)
            and (self.renamed is None or self.renamed(name) == name)
        }
        tree = restore_structure(_structure(index), paths, self._entry)
        for name, stored in tree.items() if isinstance(tree, Mapping) else ():
            if str(name) == top:
                return self._fit(state, stored, top, holder)
        return state

    def _entry(self, name: str) -> _Entry:
        row = self.index.position.get(name)
        if row is None:
            return _Entry(name)
        return _Entry(name, self.index.shape(row), torch_dtype(int(self.index.dtype_codes[row])))

    def _fit(self, fresh: Any, stored: Any, name: str, holder: Any = None) -> Any:
        kind = kind_of(type(fresh))
        if type(stored) is _Entry:
            return self._fit_entry(fresh, kind, stored)
        if kind == PER_RANK:
            return self._fit_own(fresh, stored, name)
        if kind == MAPPING and isinstance(stored, Mapping):
            return self._fit_mapping(fresh, stored, name, holder)
        if kind == LIST and isinstance(stored, list):
            return self._fit_list(fresh, stored, name)
        if kind not in (OTHER, *_CONTAINERS) or _names_parameters_inside(fresh):
            return fresh
        made = self._new(stored, name, every=True)
        return fresh if made is _NOTHING else made

    def _fit_entry(self, fresh: Any, kind: int, stored: _Entry) -> Any:
        if not self.selects(stored.name):
            return fresh
        if stored.shape is None:
            is_value = kind == OTHER or (kind == LIST and is_closed(fresh))
            return fresh if is_value or kind == PER_RANK or _names_parameters_inside(fresh) else None
        if type(fresh) is torch.Tensor and not fresh.is_meta:  # for example a history that has grown
            if fresh.shape == stored.shape:
                return fresh
            self.made.add(stored.name)
            return fresh.new_empty(stored.shape)
        if kind in (OTHER, *_CONTAINERS) and not _names_parameters_inside(fresh):
            return self._new(stored, stored.name, every=True)
        return fresh

    def _fit_own(self, fresh: Any, stored: Any, name: str) -> Any:
        """Return a `PerRank` value; only this rank's part is adapted."""
        key = rank_key(self.rank)
        if not isinstance(stored, Mapping) or key not in stored:
            return fresh
        value = self._fit(fresh.value, stored[key], f"{name}.{key}")
        return fresh if value is fresh.value else replace(fresh, value=value)

    def _fit_mapping(
        self, fresh: Mapping[Any, Any], stored: Mapping[Any, Any], name: str, holder: Any
    ) -> Any:
        if is_optimizer_dict(fresh):
            return fresh
        fixed = isinstance(holder, Module) or _is_of_module(fresh)
        drops = not fixed and "." in name and self.is_whole and _is_data(fresh) and _is_data(stored)
        twins = {str(key): twin for key, twin in stored.items()}
        kept = {key: value for key, value in fresh.items() if not drops or str(key) in twins}
        children = {
            key: value
            if str(key) not in twins or (fixed and kind_of(type(value)) == TENSOR)
            else self._fit(value, twins[str(key)], f"{name}.{key}")
            for key, value in kept.items()
        }
        own = set(map(str, children))
        has_numbers = bool(fresh) and {int}.issuperset(map(type, fresh))
        added = {}
        for key, twin in {} if fixed else stored.items():
            if str(key) not in own and (made := self._new(twin, f"{name}.{key}")) is not _NOTHING:
                # checkpoints of stock torch have only the strings of keys
                is_number = has_numbers and type(key) is str and key.lstrip("-").isdecimal()
                added[int(key) if is_number else key] = made
        if not added and len(children) == len(fresh) and all(children[key] is fresh[key] for key in children):
            return fresh
        children |= added
        if added:
            place = {part: number for number, part in enumerate(twins)}
            children = dict(sorted(children.items(), key=lambda item: place.get(str(item[0]), len(place))))
        return _with_entries(fresh, children)

    def _fit_list(self, fresh: list[Any], stored: list[Any], name: str) -> Any:
        """Return a list of the stored length, unless it contains models or optimizers."""
        pairs = enumerate(zip(fresh, stored, strict=False))
        items = [self._fit(value, twin, f"{name}.{number}") for number, (value, twin) in pairs]
        if _names_parameters_inside(fresh):
            items += fresh[len(items) :]
        else:
            every = is_closed(fresh)
            left = enumerate(stored[len(items) :], len(items))
            made = [self._new(twin, f"{name}.{number}", every=every) for number, twin in left]
            if _NOTHING in made:
                made = []
            if not self.is_whole:
                made += fresh[len(items) :]
            items += made
        same = len(items) == len(fresh) and all(new is old for new, old in zip(items, fresh, strict=True))
        return fresh if same else items

    def _new(self, stored: Any, name: str, *, every: bool = False) -> Any:
        """Return new containers and tensors of lost entries, or of ``every`` entry; `_NOTHING` if none.

        Values of single ranks, and parts of tensors made of other tensors, are not entries of an object's
        dict.
        """
        if type(stored) is _Entry:
            if not (every or stored.name in self.lost) or not self.selects(stored.name):
                return _NOTHING
            if stored.shape is None:
                return None
            self.made.add(stored.name)
            return torch.empty(stored.shape, dtype=stored.dtype)
        if isinstance(stored, list):
            items = [self._new(item, f"{name}.{at}", every=every) for at, item in enumerate(stored)]
            return _NOTHING if _NOTHING in items else items
        if _is_made_of_parts(stored) or any(rank_holder(f".{key}") is not None for key in stored):
            return _NOTHING
        children = {key: self._new(value, f"{name}.{key}", every=every) for key, value in stored.items()}
        children = {key: value for key, value in children.items() if value is not _NOTHING}
        is_wanted = children or (not stored and self.selects(name))
        return _with_entries(stored, children) if is_wanted else _NOTHING


def keys_with_empty(index: CheckpointIndex) -> frozenset[str]:
    """Return top-level keys with an empty dict below."""
    noted = notes_by_path(_structure(index))
    return frozenset(str(path[0]) for path in empty_dicts(noted, ()) if len(path) > 1)


def _structure(index: CheckpointIndex) -> dict[str, Any] | None:
    """Return the recorded containers, if the version is known."""
    structure = index.provenance.get("structure")
    known = isinstance(structure, dict) and structure.get("version") == STRUCTURE_VERSION
    return structure if known else None


def _with_entries(mapping: Mapping[Any, Any], entries: Mapping[Any, Any]) -> Any:
    """Copy a mapping with other entries, keeping its class if mutable."""
    if not isinstance(mapping, MutableMapping):
        return dict(entries)
    made = copy.copy(mapping)
    made.clear()
    for key, value in entries.items():  # update() of a Counter would add counts
        made[key] = value
    return made


def _is_of_module(mapping: Mapping[Any, Any]) -> bool:
    """Test for a dict of a model's parameters by name."""
    return hasattr(mapping, "_metadata") or any(
        isinstance(key, str) and "." in key and kind_of(type(value)) == TENSOR
        for key, value in mapping.items()
    )


def _names_parameters_inside(value: Any) -> bool:
    """Test whether ``value`` contains the state of a model or an optimizer."""
    if isinstance(value, Mapping):
        if is_optimizer_dict(value) or _is_of_module(value):
            return True
        value = list(value.values())
    return kind_of(type(value)) == LIST and any(
        kind_of(type(item)) in _CONTAINERS and _names_parameters_inside(item) for item in value
    )


def _is_data(value: Any) -> bool:
    """Test for a container of values without tensors."""
    if type(value) is _Entry:
        return value.shape is None
    kind = kind_of(type(value))
    if kind == MAPPING:
        return all(map(_is_data, value.values()))
    return all(map(_is_data, value)) if kind == LIST else kind == OTHER


def _is_made_of_parts(stored: Mapping[Any, Any]) -> bool:
    facts = stored.get(FACTS)
    return (
        type(facts) is _Entry
        and facts.shape is None
        and any(type(part) is _Entry and part.shape is not None for part in stored.values())
    )
