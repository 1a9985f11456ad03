"""`Stateful` objects in a state dict: asked for their state before a load, and given it back after it.

An object that was just made may have less state than one that was saved: an empty dict or list, None where a
tensor was. What it is given by ``load_state_dict()`` is what was saved, so that its own state, which is
what a load fills, is changed first where the form differs. Its tensors stay where both have one, so that
they keep their sharding and device. What names the parameters of a model or an optimizer stays as it is: what
is missing or left over there is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from dcp.calls.arguments import stateful_keys
from dcp.calls.plain_errors import warn_caller
from dcp.features.entries import is_optimizer_dict, optimizer_dicts
from dcp.features.optimizer_state import optimizers_without_state, state_dict_with_state
from dcp.loading.call import LoadCall
from dcp.loading.feature import LoadFeature, Target
from dcp.planners.flatten import (
    FACTS,
    LIST,
    MAPPING,
    OTHER,
    PER_RANK,
    TENSOR,
    flatten,
    is_closed,
    kind_of,
)
from dcp.planners.load.selection import LoadOptions, Selection, renamer
from dcp.planners.per_rank import rank_holder, rank_key
from dcp.ranks.failures import causes_of
from dcp.storage.errors import CheckpointError, OptionError, PlanError, UnexpectedKeyError
from dcp.storage.formats.container_notes import STRUCTURE_VERSION, empty_dicts, notes_by_path
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.near_names import listed
from dcp.storage.tensors import torch_dtype
from dcp.storage.torch_compat import copies_in_state

_MAX_LISTED = 5
_KINDS = {MAPPING: "a dict", LIST: "a list"}
_NOTHING: Final = object()
_CONTAINERS = (MAPPING, LIST)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the checkpoint; ``shape`` and ``dtype`` are None for values that are no tensors."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


class StatefulObjects(LoadFeature):
    """Fills the states of objects, and not the objects."""

    name = "stateful"

    def target(self, target: Target) -> Target:
        """Return the entries of the state dict, with those of the objects in it."""
        return _Objects(target.state_dict, self.options)


class _Objects(Target):
    """The entries of ``state_dict`` that a load with ``options`` is for.

    ``_added`` are settings of parameter groups that the checkpoint has and the objects lack. ``_misfits`` and
    ``_lost`` are what plans that failed said: see `fits_after`.
    """

    gives_back = True
    made: AbstractSet[str] = frozenset()
    _made: set[str]
    _stateful: Collection[Any] = ()
    _lost: frozenset[str] = frozenset()
    _index: CheckpointIndex
    _rank: int

    def __init__(self, state_dict: dict[str, Any], options: LoadOptions) -> None:
        super().__init__(state_dict)
        self._selection = selection = Selection.of(options.only, options.exclude)
        self._renamed = renamer(options.rename)
        # all ranks in one order, because state_dict() may run collectives
        self._keys: list[Any] = sorted(state_dict, key=str)
        if selection is not None:  # a tensor has no entries below it
            kept = {
                key
                for key in self._keys
                if selection.reaches(str(key))
                or (isinstance(state_dict[key], Tensor) and selection.selects(str(key)))
            }
            self.unasked = tuple(str(key) for key in self._keys if key not in kept)
            self._keys = list(filter(kept.__contains__, self._keys))
        copies = list(filter(self._selects, _copies(state_dict)))
        if copies:
            warn_caller(
                f"{_are(copies)} in the memory of no parameter or buffer: the module's state_dict() made "
                "copies, and a load fills these. Give the module what was loaded: state = "
                "module.state_dict(); dcp.load(state, ...); module.load_state_dict(state)"
            )
        self._plain: dict[str, Any] = {}
        self._added: list[tuple[dict[Any, Any], str]] = []
        self._misfits: set[bool] = set()

    def kinds(self) -> dict[str, str]:
        """Return what kind of container is at each key that has one.

        An optimizer is given the state that a checkpoint has; the dict of one that has none is not, and stays
        empty where another rank takes what is stored.
        """
        values = {key: self.state_dict[key] for key in self._keys}
        kinds = {str(key): _KINDS.get(kind_of(type(value)), "") for key, value in values.items()}
        for key in stateful_keys(self._keys, values.values()):
            kinds[str(key)] = "an optimizer" if isinstance(values[key], Optimizer) else "an object"
        return {key: kind for key, kind in kinds.items() if kind}

    def state(self, index_of: Callable[[], CheckpointIndex], rank: int) -> dict[str, Any]:
        """Return what to load into.

        Raises PlanError for objects that would not keep what they are given: on the meta device.
        """
        if self._added:
            self.take_back()
        values = list(map(self.state_dict.__getitem__, self._keys))
        self._plain.update(zip(self._keys, values, strict=True))
        self._stateful = dict.fromkeys(stateful_keys(self._keys, values))
        self.made = self._made = set()
        if self._stateful:
            self.has_objects = True
            self._index, self._rank = index_of(), rank
            for key in self._stateful:
                self._plain[key] = self._state_of(key, self._plain[key])
            with_empty = () if self._misfits else _keys_with_empty(self._index)
            for key in self._stateful:
                if self._misfits or str(key) in with_empty:
                    self._plain[key] = self._fitted(key, self.state_dict[key], self._plain[key])
        # A scheduler adds settings to parameter groups ("initial_lr"). If those were lost that the checkpoint
        # has and the state lacks, one that is made after the load would begin with the present rate.
        for begin, optimizer in optimizer_dicts(self._plain, ""):
            for number, group in enumerate(optimizer["param_groups"]):
                if isinstance(group, dict):
                    for key in self._stored_beside(index_of(), f"{begin}param_groups.{number}", group):
                        group[key] = None
                        self._added.append((group, key))
        return self._plain

    def give_back(self, call: LoadCall | None) -> None:
        """As in `Target`."""
        if not self._stateful and type(self.state_dict) is dict:
            self.state_dict.update(self._plain)  # and what a planner has added to it
            return
        untouched, new = frozenset[str](), list[str]()
        if call is not None and self._stateful:
            untouched, new = call.untouched_keys, [*chain(*(each.new for each in call.features.all))]
        for key in self._keys:
            if key not in self._stateful:
                self.state_dict[key] = self._plain[key]
            elif str(key) not in untouched:
                self._give(key, self.state_dict[key], [fqn for fqn in new if fqn.startswith(f"{key}.")])

    def fits_after(self, error: CheckpointError) -> bool:
        """As in `Target`: states of objects are fitted to the stored ones, once their kinds and once more
        their sizes.

        Those that lack what other ranks have fit as they are, so that a plan is tried without that first.
        """
        causes = causes_of(error)
        if any(isinstance(cause, OptionError) or not isinstance(cause, PlanError) for cause in causes):
            return False
        is_lost = all(isinstance(cause, UnexpectedKeyError) for cause in causes)
        if is_lost in self._misfits:
            return False
        self._misfits.add(is_lost)
        self._lost |= {name for cause in causes for name in getattr(cause, "lost", ())}
        return True

    def take_back(self) -> None:
        """As in `Target`."""
        for group, key in self._added:
            group.pop(key, None)
        self._added.clear()

    def _give(self, key: Any, value: Any, new: Sequence[str]) -> None:
        """Give an object its state, and raise PlanError where it still has tensors without memory, of those
        that were ``new``."""
        try:
            value.load_state_dict(self._plain[key])
        except CheckpointError:
            raise
        except Exception as error:  # whatever it is, it is raised with the name of the object
            raise CheckpointError(
                f"load_state_dict() of {str(key)!r} ({type(value).__name__}) raised {type(error).__name__}: "
                f"{error}",
                key=str(key),
            ) from error
        flat = _flat(key, value.state_dict()) if new else {}
        meta = [fqn for fqn in new if getattr(flat.get(fqn), "is_meta", False)]
        if meta:
            raise PlanError(
                f"{_are(meta)} on the meta device still: load_state_dict() of {str(key)!r} "
                f"({type(value).__name__}) did not take what was loaded. Give its tensors memory before the "
                "load, or let it assign (torch.nn.Module.load_state_dict(..., assign=True))",
                fqns=meta[:_MAX_LISTED],
            )

    def _state_of(self, key: Any, value: Any) -> dict[str, Any]:
        """Return the state of an object, its optimizers' included as far as the checkpoint has it."""
        state: dict[str, Any] = value.state_dict()
        self._check_real(key, value, state)
        optimizers = optimizers_without_state(value)
        if not optimizers:
            return state
        flat, names = _flat(key, state), chain(self._index.fqns, self._index.objects.fqns)
        if self._renamed is None and not any(
            name.startswith(f"{key}.") and name not in flat and self._selects(name) for name in names
        ):
            return state
        full = state_dict_with_state(value, state, optimizers, str(key), self._is_stored, self._index)
        self._made |= _flat(key, full).keys() - flat.keys()
        return full

    def _stored_beside(self, index: CheckpointIndex, fqn: str, keys: Iterable[str]) -> list[str]:
        """Return keys of values, no tensors, that the checkpoint has beside ``keys`` of the dict ``fqn``."""
        own = {str(key): f"{fqn}.{key}" for key in keys}
        names = own if self._renamed is None else {key: self._renamed(name) for key, name in own.items()}
        begins = {name.removesuffix(key) for key, name in names.items() if name.endswith(f".{key}")}
        found = {
            name.removeprefix(begin)
            for begin in begins
            for name in index.objects.fqns
            if name.startswith(begin)
        }
        more = (key for key in sorted(found - own.keys()) if "." not in key)
        return [key for key in more if self._selects(f"{fqn}.{key}")]

    def _is_stored(self, fqn: str, entry: Any) -> bool:
        """Return whether something of ``entry``, which has the flat key ``fqn``, is loaded from the
        checkpoint."""
        for name in filter(self._selects, _flat(fqn, entry)):
            stored = name if self._renamed is None else self._renamed(name)
            if stored in self._index.position or stored in self._index.objects.position:
                return True
        return False

    # -- tensors without memory ------------------------------------------------------------------------------

    def _check_real(self, key: Any, value: Any, state: Mapping[str, Any]) -> None:
        """Raise PlanError for what copies into tensors of its own that have no memory."""
        if isinstance(value, Optimizer):
            groups = value.param_groups
            if any(parameter.is_meta for group in groups for parameter in group["params"]):
                raise PlanError(
                    f"{str(key)!r}: parameters of the {type(value).__name__} are on the meta device, and its "
                    "state would go there and be lost; give the model memory first, then make the optimizer",
                    fqns=[str(key)],
                )
        elif isinstance(value, Module) and type(value).load_state_dict is Module.load_state_dict:
            meta = [f"{key}.{name}" for name, entry in state.items() if getattr(entry, "is_meta", False)]
            meta = [fqn for fqn in meta if self._is_stored(fqn, None)]
            if meta:
                raise PlanError(
                    f"{_are(meta)} on the meta device, and a module keeps its own tensors, so that nothing "
                    "would be loaded. Give it memory first: to_empty(device=...), and initialise what is not "
                    "saved, such as buffers that are not persistent. Or load into its state_dict(), and call "
                    "its load_state_dict(..., assign=True)",
                    fqns=meta[:_MAX_LISTED],
                )

    def _selects(self, fqn: str) -> bool:
        return self._selection is None or self._selection.selects(fqn)

    # -- states in the stored form ---------------------------------------------------------------------------

    def _fitted(self, key: Any, holder: Any, state: Any) -> Any:
        """Return ``state``, which ``holder`` at ``key`` of the top level gave, in the stored form.

        Containers that change are copies, for they may be the object's own. Only what no rank takes (`_lost`)
        is added to dicts and lists that have entries, since what this rank lacks may be another one's.
        """
        if isinstance(holder, Optimizer):
            return state
        index, top = self._index, str(key)
        known = index.planner_data if isinstance(index.planner_data, Mapping) else {}
        paths = {  # in the order of the state that was saved
            name: path
            for name, path in known.items()
            if isinstance(path, tuple)
            and path[:1] == (top,)
            and (name in index.position or name in index.objects.position)
            and (self._renamed is None or self._renamed(name) == name)
        }
        tree = restore_structure(_structure(index), paths, self._entry)
        for name, stored in tree.items() if isinstance(tree, Mapping) else ():
            if str(name) == top:
                return self._fit(state, stored, top, holder)
        return state

    def _entry(self, name: str) -> _Entry:
        row = self._index.position.get(name)
        if row is None:
            return _Entry(name)
        return _Entry(name, self._index.shape(row), torch_dtype(int(self._index.dtype_codes[row])))

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
        if not self._selects(stored.name):
            return fresh
        if stored.shape is None:
            is_value = kind == OTHER or (kind == LIST and is_closed(fresh))
            return fresh if is_value or kind == PER_RANK or _names_parameters_inside(fresh) else None
        if type(fresh) is torch.Tensor and not fresh.is_meta:  # one that has grown, such as a history
            if fresh.shape == stored.shape:
                return fresh
            self._made.add(stored.name)
            return fresh.new_empty(stored.shape)
        if kind in (OTHER, *_CONTAINERS) and not _names_parameters_inside(fresh):
            return self._new(stored, stored.name, every=True)
        return fresh

    def _fit_own(self, fresh: Any, stored: Any, name: str) -> Any:
        """Return a `PerRank` value, of which this rank's part counts."""
        key = rank_key(self._rank)
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
        drops = not fixed and "." in name and self._selection is None and _is_data(fresh) and _is_data(stored)
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
                # torch's own checkpoints have the strings of keys only
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
        """Return a list: as long as the stored one, unless models or optimizers are in it."""
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
            if self._selection is not None:
                made += fresh[len(items) :]
            items += made
        same = len(items) == len(fresh) and all(new is old for new, old in zip(items, fresh, strict=True))
        return fresh if same else items

    def _new(self, stored: Any, name: str, *, every: bool = False) -> Any:
        """Return new containers and tensors for what is stored, as far as it is lost, or ``every``;
        `_NOTHING` where none of it is.

        Values of single ranks, and the parts of tensors made of other tensors, are no entries of a dict for
        the object.
        """
        if type(stored) is _Entry:
            if not (every or stored.name in self._lost) or not self._selects(stored.name):
                return _NOTHING
            if stored.shape is None:
                return None
            self._made.add(stored.name)
            return torch.empty(stored.shape, dtype=stored.dtype)
        if isinstance(stored, list):
            items = [self._new(item, f"{name}.{at}", every=every) for at, item in enumerate(stored)]
            return _NOTHING if _NOTHING in items else items
        if _is_made_of_parts(stored) or any(rank_holder(f".{key}") is not None for key in stored):
            return _NOTHING
        children = {key: self._new(value, f"{name}.{key}", every=every) for key, value in stored.items()}
        children = {key: value for key, value in children.items() if value is not _NOTHING}
        is_wanted = children or (not stored and self._selects(name))
        return _with_entries(stored, children) if is_wanted else _NOTHING


def _flat(key: Any, state: Any) -> dict[str, Any]:
    return flatten({key: state}).values


def _copies(state: Mapping[Any, Any], prefix: str = "", depth: int = 2) -> Iterator[str]:
    """Yield names of copies in the state dicts of modules, also in those below keys."""
    for name in copies_in_state(state):
        yield prefix + name
    if not depth or MAPPING not in map(kind_of, set(map(type, state.values()))):
        return
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _copies(value, f"{prefix}{key}.", depth - 1)


def _are(names: Sequence[str]) -> str:
    return f"{listed(names, most=_MAX_LISTED)} {'is' if len(names) == 1 else 'are'}"


def _keys_with_empty(index: CheckpointIndex) -> frozenset[str]:
    """Return keys of the top level that have an empty dict below them."""
    noted = notes_by_path(_structure(index))
    return frozenset(str(path[0]) for path in empty_dicts(noted, ()) if len(path) > 1)


def _structure(index: CheckpointIndex) -> dict[str, Any] | None:
    """Return the notes on containers, of a version that is known."""
    structure = index.provenance.get("structure")
    known = isinstance(structure, dict) and structure.get("version") == STRUCTURE_VERSION
    return structure if known else None


def _with_entries(mapping: Mapping[Any, Any], entries: Mapping[Any, Any]) -> Any:
    """Return a copy of a mapping, of its class if that can be changed, that has other entries."""
    if not isinstance(mapping, MutableMapping):
        return dict(entries)
    made = copy.copy(mapping)
    made.clear()
    for key, value in entries.items():  # not update(), by which a Counter counts
        made[key] = value
    return made


def _is_of_module(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a dict has the parameters of a model by their names."""
    return hasattr(mapping, "_metadata") or any(
        isinstance(key, str) and "." in key and kind_of(type(value)) == TENSOR
        for key, value in mapping.items()
    )


def _names_parameters_inside(value: Any) -> bool:
    """Return whether the state of a model or an optimizer is in ``value``."""
    if isinstance(value, Mapping):
        if is_optimizer_dict(value) or _is_of_module(value):
            return True
        value = list(value.values())
    return kind_of(type(value)) == LIST and any(
        kind_of(type(item)) in _CONTAINERS and _names_parameters_inside(item) for item in value
    )


def _is_data(value: Any) -> bool:
    """Return whether there are values alone in it, and no tensors."""
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
