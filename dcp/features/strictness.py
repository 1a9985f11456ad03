"""What a checkpoint has within the dicts and objects that a load was asked to fill, and no rank takes.

Such an entry would be lost without a word: the state of an optimizer that has none, a layer that a model does
not have any more. What lies beside, under keys of the top level that are not in the state dict, was not asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import numpy.typing as npt

from dcp.features.optimizer_state import prefixes_without_state
from dcp.planners.flatten import LIST, MAPPING, PER_RANK, is_closed_list, kind_of
from dcp.planners.load.key_hints import OTHER_GROUPS, is_group
from dcp.storage.errors import UnexpectedKeyError
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.near_names import listed

if TYPE_CHECKING:
    from dcp.loading.call import LoadCall

__all__ = ["check_left", "lost_entries", "pack_left", "unexpected_keys"]

_MAX_LISTED = 10


def lost_entries(call: LoadCall, unexpected: Sequence[str], index: CheckpointIndex) -> tuple[str, ...]:
    """Return those of the ``unexpected`` names that this rank should have a place for.

    Raises UnexpectedKeyError for state of parameters that an optimizer's dict of this rank has, and no state
    of any: that another rank takes it is no help here.
    """
    if call.options.unexpected != "error" or not call.flattens:
        return ()
    lost = _names_within(unexpected, call.root, call.flat.paths, call.renamed)
    if call.renamed is None and call.world_size > 1:  # else what is lost on all ranks is told with the rest
        below = prefixes_without_state(call.root)
        own = [name for name in lost if below and name.startswith(below)]
        if own:
            raise unexpected_keys([*index.fqns, *index.objects.fqns], own)
    return lost


def _names_within(
    names: Iterable[str],
    state_dict: Mapping[Any, Any],
    paths: Mapping[str, Path],
    renamed: Callable[[str], str] | None,
) -> tuple[str, ...]:
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
    return tuple(name for name in names if name.startswith(begins))


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


# -- between ranks -------------------------------------------------------------------------------------------


def pack_left(names: Sequence[str], unexpected: Collection[str], lost: Collection[str]) -> bytes:
    """Return what a rank does not take of the checkpoint's ``names``, and what of that it should have a place
    for.

    One bit a name, because a stage of a pipeline leaves what all others take. Empty if it takes everything.
    """
    if not unexpected:
        return b""
    packed = []
    for those in map(set, (unexpected, lost)):
        column = np.fromiter((name in those for name in names), np.bool_, len(names))
        packed.append(np.packbits(column).tobytes() if those else b"")
    return bytes(msgpack.packb(packed))


def check_left(names: Sequence[str], ranks: Sequence[bytes], unmapped: Collection[str] = ()) -> None:
    """Raise UnexpectedKeyError for names that no rank takes, and some rank should, by their `pack_left`.
    ``unmapped`` are those that no rule of a weight map knows."""
    if not all(ranks):
        return
    told = [msgpack.unpackb(part) for part in ranks]
    lost = [_column(of, len(names)) for _, of in told if of]
    if not lost:
        return
    left = [_column(of, len(names)) for of, _ in told]
    rows = np.flatnonzero(np.logical_and.reduce(left) & np.logical_or.reduce(lost))
    if len(rows):
        raise unexpected_keys(names, [names[row] for row in rows.tolist()], unmapped)


def _column(packed: bytes, count: int) -> npt.NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count)


def unexpected_keys(
    names: Sequence[str], lost: Sequence[str], unmapped: Collection[str] = ()
) -> UnexpectedKeyError:
    """The error for the ``lost`` of the checkpoint's ``names``: told by what they are all of."""
    gone = set(lost)
    taken = {above for name in names if name not in gone for above in _with_parents(name)}
    groups: dict[str, list[str]] = {}
    for name in lost:
        group = next(above for above in _with_parents(name) if above == name or above not in taken)
        groups.setdefault(group, []).append(name)
    told = [
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
        f"would be lost: {listed(told, most=_MAX_LISTED, show=str)}. Give the state dict a place for what is "
        f"needed{hint}. {advice}",
        fqns=list(lost)[:_MAX_LISTED],
        lost=list(lost),
    )


def _with_parents(name: str) -> Iterable[str]:
    return accumulate(name.split("."), "{}.{}".format)
