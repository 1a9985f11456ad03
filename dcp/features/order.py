"""The features of a load, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp.features.base import LoadSession, View
from dcp.features.legacy_keys import LegacyKeys
from dcp.features.meta import MetaTensors
from dcp.features.per_rank import PerRankValues
from dcp.features.shared_memory import SharedMemory
from dcp.features.subclasses import Subclasses
from dcp.features.weight_map import MappedView
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.formats.index import CheckpointIndex

if TYPE_CHECKING:
    from dcp.loading.call import LoadCall

__all__ = ["open_load", "view_of"]


def open_load(call: LoadCall) -> list[LoadSession]:
    """A session of each feature that has a part in a load."""
    sessions = [MetaTensors(call), LegacyKeys(call), SharedMemory(call)]
    if call.flat.facts:
        sessions.append(Subclasses(call))
    if call.flat.per_rank:
        sessions.append(PerRankValues(call))
    return sessions


def view_of(index: CheckpointIndex, weights: WeightMap | None) -> View:
    """The checkpoint as a load is shown it."""
    return View(index) if weights is None else MappedView(index, weights)
