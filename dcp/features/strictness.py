"""Strict loads: refuse what a checkpoint has within the dicts and objects of a state dict, and no rank takes.

Such an entry would be lost without a word: the state of an optimizer that has none, a layer that a model does
not have any more. What lies beside, under keys of the top level that are not in the state dict, was not asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np

from dcp.features.optimizer_state import prefixes_without_state
from dcp.loading.feature import LoadFeature
from dcp.planners.flatten import LIST, MAPPING, PER_RANK, is_closed_list, kind_of
from dcp.planners.load.key_hints import OTHER_GROUPS, is_group
from dcp.storage.errors import UnexpectedKeyError
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.near_names import listed

__all__ = ["Strictness"]

_MAX_LISTED = 10


class Strictness(LoadFeature):
    """Finds the names of the checkpoint that this rank leaves, and those of them that it should have a place
    for."""

    name = "strictness"
    _lost: Sequence[str] = ()

    def agreed(self) -> dict[str, Any]:
        """Return the rule for them."""
        return {"unexpected": self.options.unexpected}

    def takes_part(self) -> bool:
        """Return whether they are an error."""
        self._lost = ()
        return self.call.options.unexpected == "error"

    def unexpected(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the same. Raises UnexpectedKeyError for state of parameters that an optimizer's dict of this
        rank has, and no state of any: that another rank takes it is no help here."""
        call = self.call
        if names and call.flattens:
            self._lost = _names_within(names, call.root, call.flat.paths, call.renamed)
        below = prefixes_without_state(call.root) if self._lost and call.world_size > 1 else ()
        if below and call.renamed is None:  # else the error of what is lost on all ranks has it
            own = [name for name in self._lost if name.startswith(below)]
            if own:
                raise _unexpected_keys(_names_of(call.index), own)
        return names

    def findings(self, *, is_shared: bool) -> Any:
        """Return one bit a name, because a stage of a pipeline leaves what all others take; None if this rank
        takes all."""
        call, view = self.call, self.call.view
        if not call.unexpected:
            return None
        lost = [*self._lost, *(view.lost(call.unexpected) if view is not None else ())]
        if call.scales:
            lost = [name for name in lost if name not in call.scales]
        names = sorted(_names_of(call.index))  # other packages' readers may order them by rank
        found = [*(_packed(names, set(those)) for those in (call.unexpected, lost)), _mark(names)]
        if is_shared:
            return found
        self.judge([found])  # an index of this rank alone
        return None

    def judge(self, found: Sequence[Any]) -> None:
        """Raise UnexpectedKeyError for names that no rank takes, and some rank should."""
        lost = [column for own in found if own is not None and len(column := own[1])]
        if not lost or any(own is None for own in found):
            return
        if len({own[2] for own in found}) > 1:  # another package's reader gave ranks other metadata
            return
        left = np.bitwise_and.reduce([own[0] for own in found]) & np.bitwise_or.reduce(lost)
        names, view = _names_of(self.call.index), self.call.view
        rows = np.flatnonzero(np.unpackbits(left, count=len(names)))
        if len(rows):
            unmapped = view.unmapped if view is not None else ()
            ordered = sorted(names)
            gone = {ordered[row] for row in rows.tolist()}
            raise _unexpected_keys(names, [name for name in names if name in gone], unmapped)


def _names_of(index: CheckpointIndex) -> list[str]:
    return [*index.fqns, *index.objects.fqns]


def _mark(names: Sequence[str]) -> bytes:
    return blake2b("\0".join(names).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _packed(names: Sequence[str], those: set[str]) -> Any:
    """Return a bit by name, for ``those``; no bits where there are none."""
    if not those:
        return np.zeros(0, np.uint8)
    return np.packbits(np.fromiter(map(those.__contains__, names), np.bool_, len(names)))


def _names_within(
    names: Iterable[str],
    state_dict: Mapping[Any, Any],
    paths: Mapping[str, Path],
    renamed: Callable[[str], str] | None,
) -> list[str]:
    """Return those of the stored ``names`` that lie below a dict or list of the top level of ``state_dict``.

    ``paths`` are those of its flat keys. Under other names (``renamed``) a dict is where most of its entries'
    names are the same: ``model.encoder`` for ``encoder`` where ``encoder.0.weight`` is loaded from
    ``model.encoder.0.weight``.
    """
    tops = {str(key) for key, value in state_dict.items() if _is_container(value)}
    prefixes = {f"{key}." for key in tops}
    if renamed is not None:
        inner = {str(path[0]) for path in paths.values()}
        prefixes = {f"{key}." for key in tops - inner}
        for fqn, path in paths.items():
            if str(path[0]) in tops:
                prefixes.add(_renamed_top(fqn.removeprefix(f"{path[0]}."), renamed(fqn)))
        prefixes.discard("")  # the checkpoint's own top level, which has whatever it has
    begins = _shortest(prefixes)
    return [name for name in names if name.startswith(begins)]


def _is_container(value: Any) -> bool:
    kind = kind_of(type(value))
    return kind in (MAPPING, PER_RANK) or (kind == LIST and not is_closed_list(value))


def _renamed_top(rest: str, name: str) -> str:
    """Return what stands in ``name`` before as much of the path ``rest`` as it ends with."""
    while rest:
        if name == rest or name.endswith(f".{rest}"):
            return name[: len(name) - len(rest)]
        rest = rest.partition(".")[2]
    parent = name.rpartition(".")[0]
    return f"{parent}." if parent else ""


def _shortest(prefixes: Collection[str]) -> tuple[str, ...]:
    """Without those that begin with another one."""
    kept: list[str] = []
    for prefix in sorted(prefixes):
        if not kept or not prefix.startswith(kept[-1]):
            kept.append(prefix)
    return tuple(kept)


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
    patterns = f"exclude={list(groups)!r} leaves these out" if is_all else "exclude=[...] leaves some out"
    hint = ""
    if any("state" in group.split(".") for group in groups):
        hint = " (an optimizer has state once it has made a step; torch's get_state_dict() makes it)"
    if any(name in unmapped for name in lost):
        hint = ", and the map a rule" + hint
    advice = f'To load without: {patterns}, unexpected="ignore" leaves out whatever there is'
    if any(map(is_group, groups)):
        advice = OTHER_GROUPS
    what = "entry that has" if len(lost) == 1 else "entries that have"
    return UnexpectedKeyError(
        f"the checkpoint has {len(lost)} {what} no place in the state dict, below keys that it asks for, and "
        f"would be lost: {listed(shown, most=_MAX_LISTED, show=str)}. Give the state dict a place for what "
        f"is needed{hint}. {advice}",
        fqns=list(lost)[:_MAX_LISTED],
        lost=list(lost),
    )


def _with_parents(name: str) -> Iterable[str]:
    return accumulate(name.split("."), "{}.{}".format)
