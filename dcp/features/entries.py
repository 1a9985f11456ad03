"""Selection of entries in a load: which entries are loaded, skipped or refused.

Covers older names, values that need trust, tensor subclasses, tuples stored as separate entries, and
strictness. A strict load refuses stored entries inside a dict or object of the state dict if no rank takes
them: for example optimizer state without a destination, or a removed layer. Top-level keys missing in the
state dict are not requested and not refused.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from hashlib import blake2b
from itertools import accumulate, filterfalse
from typing import Any

import numpy as np

from dcp.loading.feature import LoadFeature, ReadWhole
from dcp.planners.flatten import LIST, MAPPING, PER_RANK, check_facts, is_closed, kind_of
from dcp.planners.load.plan import OTHER_GROUPS, is_group
from dcp.storage.errors import UnexpectedKeyError, UnsafeObjectError
from dcp.storage.formats.container_notes import notes_by_path
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.formats.torch.python_values import decode_value
from dcp.storage.near_names import listed

logger = logging.getLogger(__name__)

_MAX_LISTED = 10
_MAX_REFUSED = 20
_GLOB = re.compile(r"[*?[]")
_OPENED = (tuple, deque)
_NESTED = 16
"""Depth of the search for optimizer state dicts; dicts can be recursive."""


class LegacyKeys(LoadFeature):
    """Finds entries under the keys of torch before 2.4, which flattened mappings like lists."""

    name = "legacy_keys"

    def names(self, index: CheckpointIndex) -> None:
        """Use old keys for entries that the checkpoint has only under old keys."""
        call, tensors, values = self.call, index.position, index.objects.position
        if not call.flattens:
            return
        chosen = call.selected(call.flat.values)
        names = chosen if call.renamed is None else map(call.renamed, chosen)
        absent = filterfalse(values.__contains__, filterfalse(tensors.__contains__, names))
        if next(absent, None) is None:
            return
        legacy, current = call.flattened(legacy=True), call.flat.values
        others = {fqn: value for fqn, value in legacy.values.items() if fqn not in current}
        stored = map(call.stored, call.selected(others))
        if any(name in tensors or (name in values and _may_be_dict(index, name)) for name in stored):
            call.flat = legacy


class Renames(LoadFeature):
    """Warn of regular expressions that match no key on any rank."""

    name = option = "rename"

    def findings(self, *, is_shared: bool) -> bool | None:
        """Return a flag for each rule that changes a name; None without rules, and for functions."""
        names, given = self.call.names or {}, self.options.rename
        is_given = isinstance(given, Mapping) and bool(given)
        return any(map(str.__ne__, names, names.values())) if is_given else None

    def judge(self, found: Sequence[Any]) -> None:
        """Log the warning on one rank."""
        if self.call.rank == 0 and all(one is False for one in found):
            logger.warning(
                "rename=%r changes no name of the state dict: patterns are regular expressions on flat keys, "
                "such as %r",
                self.options.rename,
                next(iter(self.call.flat.values), ""),
            )


class TrustedValues(LoadFeature):
    """Refuse values of torch.save files whose pickles would run code; they count as neither stored nor
    missing."""

    name = "trusted_values"

    def entries(self, index: CheckpointIndex) -> None:
        """Raise UnsafeObjectError for requested ones."""
        refused = index.provenance.get("refused_objects")
        if not isinstance(refused, dict) or not refused:
            return
        found = [name for name in map(self.call.stored, self.call.values) if name in refused]
        if found:
            shown = ", ".join(f"{name!r} (needs {refused[name]})" for name in found[:_MAX_REFUSED])
            raise UnsafeObjectError(
                f"{len(found)} entries contain pickled objects that are not on the allow-list and were not "
                f"unpickled: {shown}. Pass exclude=..., or load the file with torch.load and save it "
                "again without these objects",
                fqns=found[:_MAX_REFUSED],
            )


class Subclasses(LoadFeature):
    """Compares tensor subclasses with inner tensors; the inner tensors are normal entries."""

    name = "subclasses"

    def takes_part(self) -> bool:
        """Test for tensors of subclasses."""
        return bool(self.call.flat.facts)

    def accept(self, fqn: str, value: Any) -> bool:
        """Raise PlanError where the checkpoint has another kind of tensor."""
        flat = self.call.flat
        if fqn not in flat.facts:
            return False
        check_facts(fqn, flat.values[fqn], value)
        return True


class OpenedTuples(LoadFeature):
    """Combine values such as an optimizer's tensor ``betas``: one value in a state dict, but separate entries
    in a torch.save file or a conversion."""

    name = "opened_tuples"
    _found: Sequence[tuple[str, str, Path]] = ()

    def takes_part(self) -> bool:
        """Test for such values in the state dict."""
        self._found = ()
        return not set(_OPENED).isdisjoint(map(type, self.call.flat.values.values()))

    def entries(self, index: CheckpointIndex) -> None:
        """Skip values stored in parts."""
        call, values = self.call, index.objects.position
        pairs = [(fqn, call.stored(fqn)) for fqn, value in call.values.items() if type(value) in _OPENED]
        absent = [(fqn, name) for fqn, name in pairs if name not in values and name not in index.position]
        noted = notes_by_path(index.provenance.get("structure")) if absent else {}
        paths = [path for path, note in noted.items() if note.get("kind") in ("tuple", "deque")]
        opened = {".".join(map(str, path)): path for path in paths}
        self._found = [(fqn, name, opened[name]) for fqn, name in absent if name in opened]
        self.made = self.whole = [fqn for fqn, _, _ in self._found]
        if self._found:
            call.values = {fqn: value for fqn, value in call.values.items() if fqn not in self.made}

    def unexpected(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Skip the parts."""
        within = tuple(f"{name}." for _, name, _ in self._found)
        return tuple(name for name in names if not name.startswith(within))

    def loaded(self, read_whole: ReadWhole) -> None:
        """Assemble the values from their parts."""
        if self._found:
            state, _ = read_whole([_GLOB.sub(r"[\g<0>]", name) for _, name, _ in self._found])
            values = [reduce(lambda part, key: part[key], path, state) for _, _, path in self._found]
            self.call.take([fqn for fqn, _, _ in self._found], values)


class Strictness(LoadFeature):
    """Refuse stored entries that no rank loads."""

    name = "strictness"
    _lost: Sequence[str] = ()

    def agreed(self) -> dict[str, Any]:
        """Return the rule for unexpected entries, which must be equal on all ranks."""
        return {"unexpected": self.options.unexpected}

    def unexpected(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return stored names without a place in this rank's state dict.

        Raises UnexpectedKeyError for parameter state missing in an optimizer's dict of this rank, whatever
        other ranks take.
        """
        call, self._lost = self.call, ()
        if names and call.flattens and call.options.unexpected == "error":
            self._lost = _names_within(names, call.root, call.flat.paths, call.renamed)
        below = _prefixes_without_state(call.root) if self._lost and call.world_size > 1 else ()
        if below and call.renamed is None:  # otherwise the error for all ranks names the entry
            own = [name for name in self._lost if name.startswith(below)]
            if own:
                raise _unexpected_keys(_names_of(call.index), own)
        return names

    def findings(self, *, is_shared: bool) -> Any:
        """Return a bit for each name, since pipeline stages take different names; None if this rank takes
        all."""
        call, view = self.call, self.call.view
        if not call.unexpected or call.options.unexpected != "error":
            return None
        lost = [*self._lost, *(view.lost(call.unexpected) if view is not None else ())]
        if call.scales:
            lost = [name for name in lost if name not in call.scales]
        names = sorted(_names_of(call.index))  # readers of other packages may order names by rank
        mark = blake2b("\0".join(names).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        found = [*(_packed(names, set(those)) for those in (call.unexpected, lost)), mark]
        if is_shared:
            return found
        self.judge([found])  # this rank has a separate index
        return None

    def judge(self, found: Sequence[Any]) -> None:
        """Raise UnexpectedKeyError for names that no rank takes but some rank should."""
        lost = [column for own in found if own is not None and len(column := own[1])]
        if not lost or any(own is None for own in found):
            return
        # a reader of another package returned different metadata on the ranks
        if len({own[2] for own in found}) > 1:
            return
        left = np.bitwise_and.reduce([own[0] for own in found]) & np.bitwise_or.reduce(lost)
        names, view = _names_of(self.call.index), self.call.view
        rows = np.flatnonzero(np.unpackbits(left, count=len(names)))
        if len(rows):
            unmapped = view.unmapped if view is not None else ()
            ordered = sorted(names)
            gone = {ordered[row] for row in rows.tolist()}
            raise _unexpected_keys(names, [name for name in names if name in gone], unmapped)


def _may_be_dict(index: CheckpointIndex, name: str) -> bool:
    """Return False for values that are certainly not dicts; contents of pickles and torch metadata are
    unknown."""
    objects = index.objects
    plain = objects.plain[objects.position[name]] if objects.values else -1
    return plain < 0 or isinstance(decode_value(objects.values[plain]), Mapping)


def _names_of(index: CheckpointIndex) -> list[str]:
    return [*index.fqns, *index.objects.fqns]


def _packed(names: Sequence[str], those: set[str]) -> Any:
    """Return a bit for each name: set if in ``those``. No bits if ``those`` is empty."""
    if not those:
        return np.zeros(0, np.uint8)
    return np.packbits(np.fromiter(map(those.__contains__, names), np.bool_, len(names)))


def _names_within(
    names: Iterable[str],
    state_dict: Mapping[Any, Any],
    paths: Mapping[str, Path],
    renamed: Callable[[str], str] | None,
) -> list[str]:
    """Return the stored ``names`` below dicts and lists at the top level of ``state_dict``.

    ``paths`` belong to its flat keys. With ``renamed``, most entries of a dict decide its stored name:
    ``model.encoder`` for ``encoder`` if ``encoder.0.weight`` is loaded from ``model.encoder.0.weight``.
    """
    tops = set()
    for key, value in state_dict.items():
        kind = kind_of(type(value))
        if kind in (MAPPING, PER_RANK) or (kind == LIST and not is_closed(value)):
            tops.add(str(key))
    prefixes = {f"{key}." for key in tops}
    if renamed is not None:
        inner = {str(path[0]) for path in paths.values()}
        prefixes = {f"{key}." for key in tops - inner}
        for fqn, path in paths.items():
            if str(path[0]) in tops:
                prefixes.add(_renamed_top(fqn.removeprefix(f"{path[0]}."), renamed(fqn)))
        prefixes.discard("")  # the top level of the checkpoint may have any other entries
    begins: list[str] = []  # omit prefixes below another prefix
    for prefix in sorted(prefixes):
        if not begins or not prefix.startswith(begins[-1]):
            begins.append(prefix)
    return [name for name in names if name.startswith(tuple(begins))]


def _renamed_top(rest: str, name: str) -> str:
    """Return the beginning of ``name`` before the common end with the path ``rest``."""
    while rest:
        if name == rest or name.endswith(f".{rest}"):
            return name[: len(name) - len(rest)]
        rest = rest.partition(".")[2]
    parent = name.rpartition(".")[0]
    return f"{parent}." if parent else ""


def _unexpected_keys(
    names: Sequence[str], lost: Sequence[str], unmapped: Collection[str] = ()
) -> UnexpectedKeyError:
    """Return the error for the ``lost`` of the checkpoint's ``names``, in groups by their common parents."""
    gone = set(lost)
    taken = {above for name in names if name not in gone for above in _with_parents(name)}
    groups: dict[str, list[str]] = {}
    for name in lost:
        group = next(above for above in _with_parents(name) if above == name or above not in taken)
        groups.setdefault(group, []).append(name)
    shown = [
        repr(group) if below == [group] else f"{group!r} ({len(below)} below it, such as {below[0]!r})"
        for group, below in groups.items()
    ]
    is_all = len(groups) <= _MAX_LISTED
    patterns = f"exclude={list(groups)!r}" if is_all else "exclude=[...]"
    hint = ""
    if any("state" in group.split(".") for group in groups):
        hint = " (an optimizer has state after its first step; torch's get_state_dict() initializes it)"
    if any(name in unmapped for name in lost):
        hint = ", and the map a rule" + hint
    advice = f'To load without these entries, pass {patterns} or unexpected="ignore"'
    if any(map(is_group, groups)):
        advice = OTHER_GROUPS
    what = "entry that has" if len(lost) == 1 else "entries that have"
    return UnexpectedKeyError(
        f"the checkpoint has {len(lost)} {what} no place in the state dict, below keys to load, and would "
        f"be lost: {listed(shown, most=_MAX_LISTED, show=str)}. Add the needed entries to the state "
        f"dict{hint}. {advice}",
        fqns=list(lost)[:_MAX_LISTED],
        lost=list(lost),
    )


def _with_parents(name: str) -> Iterable[str]:
    return accumulate(name.split("."), "{}.{}".format)


# -- state dicts of optimizers -------------------------------------------------------------------------------


def is_optimizer_dict(state: Mapping[Any, Any]) -> bool:
    """Test for the form of an optimizer's state dict."""
    return "state" in state and isinstance(state.get("param_groups"), list)


def optimizer_dicts(
    state: Mapping[Any, Any], prefix: str, depth: int = _NESTED
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield (prefix of flat keys, optimizer state dict) found in ``state`` or below.

    ``prefix`` is the prefix of the flat keys of ``state``.
    """
    is_optimizer = is_optimizer_dict(state)
    if is_optimizer:
        yield prefix, state
    elif MAPPING not in map(kind_of, set(map(type, state.values()))):
        return  # quick, for a model of many tensors
    if not depth:
        return
    for key, value in state.items():
        if kind_of(type(value)) == MAPPING and not (is_optimizer and key == "state"):
            yield from optimizer_dicts(value, f"{prefix}{key}.", depth - 1)


def _prefixes_without_state(state: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return prefixes of flat keys for parameter state of optimizers in ``state`` without any state."""
    return tuple(
        f"{prefix}state.{parameter}."
        for prefix, optimizer in optimizer_dicts(state, "")
        if isinstance(optimizer["state"], Mapping) and not optimizer["state"]
        for group in optimizer["param_groups"]
        if isinstance(group, Mapping) and isinstance(group.get("params"), list)
        for parameter in group["params"]
        if isinstance(parameter, str | int)
    )
