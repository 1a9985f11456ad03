"""Options of a save or load that must be the same on all ranks, because the outcome would differ by rank.

What they are is said here alone; `dcp.ranks.handshake` compares them. `rename` is not among them: stages of a
pipeline may number their layers on their own. Nor are what concerns one rank (``progress``, ``thread_count``)
or one host (``storage_options``), and what the coordinator's alone counts of (``user_metadata``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from dcp.calls.arguments import stateful_keys
from dcp.planners.flatten import LIST, MAPPING, kind_of
from dcp.planners.load.options import LoadOptions
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.torch_storage.reader import FileSystemReader

if TYPE_CHECKING:  # of engines, which stand above
    from dcp.loading.planner import DefaultLoadPlanner

__all__ = ["kinds_of", "of_load", "of_map"]

_KINDS = {MAPPING: "a dict", LIST: "a list"}
_OF_LOADS = (
    "only",
    "exclude",
    "per_rank",
    "unexpected",
    "dtype",
    "allow_partial_load",
    "weights_only",
)
_OF_LOAD_PLANNERS = ("flatten_state_dict", "flatten_sharded_tensors")


def of_load(
    options: LoadOptions, planner: DefaultLoadPlanner | None, reader: FileSystemReader | None
) -> dict[str, Any]:
    """Return the options of a load with ``options``, by the names that its caller knows; what other
    packages' planners and storages (None) make of them is not known."""
    told: dict[str, Any] = {}
    if planner is not None:
        told |= _values(options, _OF_LOADS) | _values(planner, _OF_LOAD_PLANNERS)
    for name in ("only", "exclude"):  # in any order; one string is one pattern
        if isinstance(told.get(name), list | tuple | set | frozenset):
            patterns = sorted(told[name])
            told[name] = patterns[0] if len(patterns) == 1 else patterns
    told |= of_map(options.map)
    return told if reader is None else told | {"verify": options.verify or reader.verify}


def of_map(weights: WeightMap | None) -> dict[str, Any]:
    """Return the map that a rank was given, in few characters."""
    return {} if weights is None else {"map": weights.mark}


def _values(target: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(target, name) for name in names}


def kinds_of(keys: Sequence[Any], values: Sequence[Any]) -> dict[str, str]:
    """Return the kind of container at each of ``keys``, of the top level, that has one.

    An optimizer is given the state that a checkpoint has; the dict of one that has none is not, and stays
    empty where another rank takes what is stored.
    """
    kinds = {cls: _KINDS[kind] for cls in set(map(type, values)) if (kind := kind_of(cls)) in _KINDS}
    pairs = zip(keys, values, strict=True) if kinds else ()
    told = {str(key): kinds[type(value)] for key, value in pairs if type(value) in kinds}
    stateful = set(stateful_keys(keys, values))
    for key, value in zip(keys, values, strict=True) if stateful else ():
        if key in stateful:
            told[str(key)] = "an optimizer" if isinstance(value, Optimizer) else "an object"
    return told
