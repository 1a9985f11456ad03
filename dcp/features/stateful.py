"""`Stateful` objects in a state dict: asked for their state before a load, and given it back after it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from dcp.calls.arguments import stateful_keys
from dcp.calls.plain_errors import warn_caller
from dcp.features.fitted_state import StoredForms, keys_with_empty
from dcp.features.optimizer_state import optimizers_without_state, parameter_groups, state_dict_with_state
from dcp.loading.feature import LoadFeature, Stored, Target
from dcp.planners.flatten import LIST, MAPPING, flatten_state_dict, kind_of
from dcp.planners.load.options import LoadOptions
from dcp.planners.load.selection import Selection, renamer
from dcp.ranks.exchanges import causes_of
from dcp.storage.errors import CheckpointError, OptionError, PlanError, UnexpectedKeyError
from dcp.storage.near_names import listed
from dcp.storage.torch_compat import copies_in_state

__all__ = ["StatefulObjects"]

_MAX_LISTED = 5
_KINDS = {MAPPING: "a dict", LIST: "a list"}


class StatefulObjects(LoadFeature):
    """Fills the states of objects, and not the objects."""

    name = "stateful"

    def target(self, target: Target) -> Target:
        """Return the entries of the state dict, with those of the objects in it."""
        return _Objects(target.state_dict, self.options)


class _Objects(Target):
    """The entries of ``state_dict`` that a load with ``options`` is for."""

    gives_back = True

    def __init__(self, state_dict: dict[str, Any], options: LoadOptions) -> None:
        super().__init__(state_dict)
        self._selection = Selection.of(options.only, options.exclude)
        self._renamed = renamer(options.rename)
        # all ranks in one order, because state_dict() may run collectives
        self._keys: list[Any] = sorted(state_dict, key=str)
        if self._selection is not None:
            keys, self._keys = self._keys, []
            for key in keys:
                if self._selection.reaches(str(key)) or self._is_selected_tensor(key):
                    self._keys.append(key)
                else:
                    self.unasked += (str(key),)
        copies = list(filter(self._selects, _copies(state_dict)))
        if copies:
            warn_caller(
                f"{_are(copies)} in the memory of no parameter or buffer: the module's state_dict() made "
                "copies, and a load fills these. Give the module what was loaded: state = "
                "module.state_dict(); dcp.load(state, ...); module.load_state_dict(state)"
            )
        self._made: frozenset[str] = frozenset()
        self._plain: dict[str, Any] = {}
        self._stateful: Collection[Any] = ()
        self._added: list[tuple[dict[Any, Any], str]] = []
        self._misfits: set[bool] = set()
        self._lost: frozenset[str] = frozenset()

    def _is_selected_tensor(self, key: Any) -> bool:
        """Return whether there is a tensor that is selected: it has no entries below it."""
        return isinstance(self.state_dict[key], Tensor) and self._selects(str(key))

    @property
    def made(self) -> frozenset[str]:
        """Entries whose tensors were made for this load."""
        return self._made

    def kinds(self) -> dict[str, str]:
        """Return what kind of container is at each key that has one.

        An optimizer is given the state that a checkpoint has; the dict of one that has none is not, and stays
        empty where another rank takes what is stored.
        """
        found = {}
        values = [self.state_dict[key] for key in self._keys]
        for key, value in zip(self._keys, values, strict=True):
            kind = kind_of(type(value))
            if kind in _KINDS:
                found[str(key)] = _KINDS[kind]
        for key in stateful_keys(self._keys, values):
            found[str(key)] = "an optimizer" if isinstance(self.state_dict[key], Optimizer) else "an object"
        return found

    def state(self, stored: Stored) -> dict[str, Any]:
        """Return what to load into, from a checkpoint with the entries ``stored``.

        Raises PlanError for objects that would not keep what they are given: on the meta device.
        """
        self.take_back()
        made: set[str] = set()
        values = list(map(self.state_dict.__getitem__, self._keys))
        self._plain.update(zip(self._keys, values, strict=True))
        self._stateful = dict.fromkeys(stateful_keys(self._keys, values))
        if self._stateful:
            self.has_objects = True
            for key in self._stateful:
                self._plain[key] = self._state_of(key, self._plain[key], stored, made)
            with_empty = () if self._misfits else keys_with_empty(stored.index_of())
            fitted = [key for key in self._stateful if self._misfits or str(key) in with_empty]
            if fitted:
                self._fit(fitted, stored, made)
        # A scheduler adds settings to parameter groups ("initial_lr"). If those were lost that the checkpoint
        # has and the state lacks, one that is made after the load would begin with the present rate.
        for name, group in parameter_groups(self._plain, ""):
            for key in self._stored_beside(stored, name, group):
                group[key] = None
                self._added.append((group, key))
        self._made = frozenset(made)
        return self._plain

    def give_back(self, untouched: Collection[str], materialised: Collection[str]) -> None:
        """As in `Target`."""
        if not self._stateful and type(self.state_dict) is dict:
            self.state_dict.update(self._plain)
            return
        for key in self._keys:
            if key not in self._stateful:
                self.state_dict[key] = self._plain[key]
            elif str(key) not in untouched:
                value = self.state_dict[key]
                self._give(key, value)
                self._check_kept(key, value, materialised)

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

    def _fit(self, keys: Iterable[Any], stored: Stored, made: set[str]) -> None:
        forms = StoredForms(
            stored.index_of(),
            lost=self._lost,
            selection=self._selection,
            renamed=self._renamed,
            rank=stored.rank,
        )
        for key in keys:
            self._plain[key] = forms.fit(key, self.state_dict[key], self._plain[key])
        made |= forms.made

    def _give(self, key: Any, value: Any) -> None:
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

    def _state_of(self, key: Any, value: Any, stored: Stored, made: set[str]) -> dict[str, Any]:
        state: dict[str, Any] = value.state_dict()
        self._check_real(key, value, state, stored)
        optimizers = optimizers_without_state(value)
        if not optimizers:
            return state
        flat = _flat(key, state)
        if not self._may_lose(f"{key}.", flat, stored):
            return state
        is_stored = partial(self._is_stored, stored)
        full = state_dict_with_state(value, state, optimizers, str(key), is_stored, stored.index_of)
        made |= _flat(key, full).keys() - flat.keys()
        return full

    def take_back(self) -> None:
        """As in `Target`."""
        for group, key in self._added:
            group.pop(key, None)
        self._added.clear()

    def _stored_beside(self, stored: Stored, fqn: str, keys: Iterable[str]) -> list[str]:
        """Return keys of values, no tensors, that the checkpoint has beside ``keys`` of the dict ``fqn``."""
        own = {str(key): f"{fqn}.{key}" for key in keys}
        names = own if self._renamed is None else {key: self._renamed(name) for key, name in own.items()}
        begins = {name.removesuffix(key) for key, name in names.items() if name.endswith(f".{key}")}
        found = {
            name.removeprefix(begin) for begin in begins for name in stored.values if name.startswith(begin)
        }
        more = (key for key in sorted(found - own.keys()) if "." not in key)
        return [key for key in more if self._selects(f"{fqn}.{key}")]

    def _may_lose(self, prefix: str, flat: Mapping[str, Any], stored: Stored) -> bool:
        """Return whether the checkpoint seems to have something that ``flat`` has no place for."""
        return self._renamed is not None or any(
            name.startswith(prefix) and name not in flat and self._selects(name) for name in stored.names
        )

    def _is_stored(self, stored: Stored, fqn: str, entry: Any) -> bool:
        """Return whether something of ``entry``, which has the flat key ``fqn``, is loaded from the
        checkpoint."""
        renamed = self._renamed
        return any(
            self._selects(name) and (name if renamed is None else renamed(name)) in stored.names
            for name in _flat(fqn, entry)
        )

    # -- tensors without memory ------------------------------------------------------------------------------

    def _check_real(self, key: Any, value: Any, state: Mapping[str, Any], stored: Stored) -> None:
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
            meta = [fqn for fqn in meta if self._is_stored(stored, fqn, None)]
            if meta:
                raise PlanError(
                    f"{_are(meta)} on the meta device, and a module keeps its own tensors, so that nothing "
                    "would be loaded. Give it memory first: to_empty(device=...), and initialise what is not "
                    "saved, such as buffers that are not persistent. Or load into its state_dict(), and call "
                    "its load_state_dict(..., assign=True)",
                    fqns=meta[:_MAX_LISTED],
                )

    def _check_kept(self, key: Any, value: Any, materialised: Iterable[str]) -> None:
        """Raise PlanError where an object still has tensors without memory, which were loaded."""
        names = [fqn for fqn in materialised if fqn.startswith(f"{key}.")]
        if not names:
            return
        flat = _flat(key, value.state_dict())
        meta = [fqn for fqn in names if getattr(flat.get(fqn), "is_meta", False)]
        if meta:
            raise PlanError(
                f"{_are(meta)} on the meta device still: load_state_dict() of {str(key)!r} "
                f"({type(value).__name__}) did not take what was loaded. Give its tensors memory before the "
                "load, or let it assign (torch.nn.Module.load_state_dict(..., assign=True))",
                fqns=meta[:_MAX_LISTED],
            )

    def _selects(self, fqn: str) -> bool:
        return self._selection is None or self._selection.selects(fqn)


def _flat(key: Any, state: Any) -> dict[str, Any]:
    return flatten_state_dict({key: state})[0]


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
