"""`Stateful` objects in a state dict: their state is read before a load, and passed to load_state_dict()
afterwards.

A new object may have less state than the saved one: an empty dict or list, or None for a tensor.
``load_state_dict()`` expects the saved form, so the object's state is first changed to the stored form
(`dcp.features.stored_form`). Existing tensors keep their sharding and device. Missing and unexpected entries
of models and optimizers are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from dcp.calls.arguments import stateful_keys
from dcp.calls.plain_errors import warn_caller
from dcp.features.entries import optimizer_dicts
from dcp.features.optimizer_state import optimizers_without_state, state_dict_with_state
from dcp.features.stored_form import StoredForm, keys_with_empty
from dcp.loading.call import LoadCall
from dcp.loading.feature import LoadFeature, Target
from dcp.planners.flatten import (
    LIST,
    MAPPING,
    flatten,
    kind_of,
)
from dcp.planners.load.selection import LoadOptions, Selection, renamer
from dcp.ranks.failures import causes_of
from dcp.storage.errors import CheckpointError, OptionError, PlanError, UnexpectedKeyError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.near_names import listed
from dcp.storage.torch_compat import copies_in_state

_MAX_LISTED = 5
_KINDS = {MAPPING: "a dict", LIST: "a list"}


class StatefulObjects(LoadFeature):
    """Replaces `Stateful` objects by their states."""

    name = "stateful"

    def target(self, target: Target) -> Target:
        """Return the entries of the state dict, including those of objects."""
        return _Objects(target.state_dict, self.options)


class _Objects(Target):
    """Entries of ``state_dict`` for a load with ``options``.

    ``_added`` are parameter group settings that only the checkpoint has. ``_misfits`` and ``_lost`` come from
    failed plans: see `fits_after`.
    """

    gives_back = True
    made: AbstractSet[str] = frozenset()
    _made: set[str]
    _stateful: Collection[Any] = ()
    _lost: frozenset[str] = frozenset()
    _index: CheckpointIndex

    def __init__(self, state_dict: dict[str, Any], options: LoadOptions) -> None:
        super().__init__(state_dict)
        self._selection = selection = Selection.of(options.only, options.exclude)
        self._renamed = renamer(options.rename)
        # the same order on all ranks, because state_dict() may run collectives
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
                "copies, and a load fills these. Copy the loaded state into the module: state = "
                "module.state_dict(); dcp.load(state, ...); module.load_state_dict(state)"
            )
        self._plain: dict[str, Any] = {}
        self._added: list[tuple[dict[Any, Any], str]] = []
        self._misfits: set[bool] = set()

    def kinds(self) -> dict[str, str]:
        """Return the kind of container at each key.

        The dict of an optimizer without state is left out, and stays empty if another rank takes the stored
        state.
        """
        values = {key: self.state_dict[key] for key in self._keys}
        kinds = {str(key): _KINDS.get(kind_of(type(value)), "") for key, value in values.items()}
        for key in stateful_keys(self._keys, values.values()):
            kinds[str(key)] = "an optimizer" if isinstance(values[key], Optimizer) else "an object"
        return {key: kind for key, kind in kinds.items() if kind}

    def state(self, index_of: Callable[[], CheckpointIndex], rank: int) -> dict[str, Any]:
        """Return the state to load into.

        Raises PlanError for objects on the meta device, which would lose their values.
        """
        if self._added:
            self.take_back()
        values = list(map(self.state_dict.__getitem__, self._keys))
        self._plain.update(zip(self._keys, values, strict=True))
        self._stateful = dict.fromkeys(stateful_keys(self._keys, values))
        self.made = self._made = set()
        if self._stateful:
            self.has_objects = True
            self._index = index_of()
            for key in self._stateful:
                self._plain[key] = self._state_of(key, self._plain[key])
            with_empty = () if self._misfits else keys_with_empty(self._index)
            form = StoredForm(
                self._index,
                rank,
                self._selects,
                self._selection is None,
                self._renamed,
                self._lost,
                self._made,
            )
            for key in self._stateful:
                if self._misfits or str(key) in with_empty:
                    self._plain[key] = form.fitted(key, self.state_dict[key], self._plain[key])
        # Schedulers add settings to parameter groups ("initial_lr"). Without the stored ones, a scheduler
        # made after the load would start from the present rate.
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
            self.state_dict.update(self._plain)  # includes entries added by a planner
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
        """Adapt states of objects to the stored form, first kinds, then sizes; see `Target`.

        Objects without the entries of other ranks count as fitting, so that planning starts without a change.
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
        """Give an object its state. Raises PlanError for remaining ``new`` tensors without memory."""
        try:
            value.load_state_dict(self._plain[key])
        except CheckpointError:
            raise
        except Exception as error:  # any error is raised with the object's name
            raise CheckpointError(
                f"load_state_dict() of {str(key)!r} ({type(value).__name__}) raised {type(error).__name__}: "
                f"{error}",
                key=str(key),
            ) from error
        flat = _flat(key, value.state_dict()) if new else {}
        meta = [fqn for fqn in new if getattr(flat.get(fqn), "is_meta", False)]
        if meta:
            raise PlanError(
                f"{_are(meta)} still on the meta device: load_state_dict() of {str(key)!r} "
                f"({type(value).__name__}) did not copy the loaded tensors. Allocate its tensors before "
                f"the load, or assign (torch.nn.Module.load_state_dict(..., assign=True))",
                fqns=meta[:_MAX_LISTED],
            )

    def _state_of(self, key: Any, value: Any) -> dict[str, Any]:
        """Return the state of an object, including stored state of its optimizers."""
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
        """Return keys of stored values beside ``keys`` of the dict ``fqn``."""
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
        """Test whether the checkpoint has a part of ``entry`` with flat key ``fqn``."""
        for name in filter(self._selects, _flat(fqn, entry)):
            stored = name if self._renamed is None else self._renamed(name)
            if stored in self._index.position or stored in self._index.objects.position:
                return True
        return False

    # -- tensors without memory ------------------------------------------------------------------------------

    def _check_real(self, key: Any, value: Any, state: Mapping[str, Any]) -> None:
        """Raise PlanError for objects with own tensors without memory."""
        if isinstance(value, Optimizer):
            groups = value.param_groups
            if any(parameter.is_meta for group in groups for parameter in group["params"]):
                raise PlanError(
                    f"{str(key)!r}: parameters of the {type(value).__name__} are on the meta device, so "
                    f"the optimizer's state would be lost; materialize the model first "
                    f"(to_empty(device=...)), then create the optimizer",
                    fqns=[str(key)],
                )
        elif isinstance(value, Module) and type(value).load_state_dict is Module.load_state_dict:
            meta = [f"{key}.{name}" for name, entry in state.items() if getattr(entry, "is_meta", False)]
            meta = [fqn for fqn in meta if self._is_stored(fqn, None)]
            if meta:
                raise PlanError(
                    f"{_are(meta)} on the meta device, so nothing would be loaded. Materialize the module "
                    f"first with to_empty(device=...), and initialize non-persistent buffers, which are not "
                    f"saved. Or load into module.state_dict(), and call module.load_state_dict(..., "
                    "assign=True)",
                    fqns=meta[:_MAX_LISTED],
                )

    def _selects(self, fqn: str) -> bool:
        return self._selection is None or self._selection.selects(fqn)


def _flat(key: Any, state: Any) -> dict[str, Any]:
    return flatten({key: state}).values


def _copies(state: Mapping[Any, Any], prefix: str = "", depth: int = 2) -> Iterator[str]:
    """Yield names of copies in state dicts of modules, including nested ones."""
    for name in copies_in_state(state):
        yield prefix + name
    if not depth or MAPPING not in map(kind_of, set(map(type, state.values()))):
        return
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _copies(value, f"{prefix}{key}.", depth - 1)


def _are(names: Sequence[str]) -> str:
    return f"{listed(names, most=_MAX_LISTED)} {'is' if len(names) == 1 else 'are'}"
