"""What one rank contributes to a save: columns, local tensors, values; nothing is nested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp.objects import encode_object
from dcp.planners.columns import SaveColumns
from dcp.planners.digest import ReplicaCheck, digest_bytes
from dcp.planners.save_planner import OPAQUE_OBJECT_BYTES, DefaultSavePlanner, item_digests

__all__ = ["EncodedObject", "LocalState", "PlanOptions"]


class EncodedObject(NamedTuple):
    """A value as it will be stored: torch.save bytes, and plain msgpack bytes where it is plain data."""

    blob: bytes
    plain: bytes | None


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What of a `DefaultSavePlanner` decides on the global plan."""

    dedup_to_lowest_rank: bool = False
    split_bytes: int | None = None
    replica_check: ReplicaCheck = "sampled"

    @classmethod
    def of(cls, planner: DefaultSavePlanner) -> PlanOptions:
        """The options of ``planner``."""
        return cls(planner.dedup_save_to_lowest_rank, planner.split_bytes, planner.replica_check)


@dataclass(frozen=True, eq=False)
class LocalState:
    """One rank's part of a state dict.

    ``sources`` are the local tensors by the source numbers of ``columns``: the state's own, on any device, or
    staged copies. ``objects`` are the values by object row, encoded where they must not change any more.
    ``replicated`` (by item) says which boxes other ranks may hold too.
    """

    columns: SaveColumns
    sources: Sequence[torch.Tensor]
    objects: Sequence[Any]
    replicated: npt.NDArray[np.uint8]

    @classmethod
    def collect(cls, planner: DefaultSavePlanner, *, digests: bool) -> LocalState:
        """The state that ``planner`` was set up with; ``digests=False`` leaves them for later."""
        columns, sources, objects = planner.create_local_columns(digests=digests)
        return cls(columns, sources, objects, planner.item_replicated)

    def encoded(self) -> LocalState:
        """The same with all values encoded: later changes of lists and dicts do not reach them."""
        cache: dict[bytes, bytes] = {}
        return replace(self, objects=[encoded_object(value, cache) for value in self.objects])

    def with_digests(self, check: ReplicaCheck) -> LocalState:
        """The same with the digests that the replica check compares; the values must be encoded."""
        if check == "off":
            return self
        objects = self.columns.objects
        digests = np.zeros(len(objects.fqns), np.uint64)
        sizes = np.zeros(len(objects.fqns), np.int64)
        for row, value in enumerate(self.objects):
            plain = value.plain
            digests[row] = digest_bytes(plain) if plain is not None else 0
            sizes[row] = len(plain) if plain is not None else max(len(value.blob), OPAQUE_OBJECT_BYTES)
        columns = replace(
            self.columns,
            item_digests=item_digests(self.columns, self.replicated, self.sources, check),
            objects=replace(objects, digests=digests, sizes=sizes),
        )
        return replace(self, columns=columns)


def encoded_object(value: Any, cache: dict[bytes, bytes]) -> EncodedObject:
    """``value`` encoded, unless it is already; ``cache`` lives as long as one save."""
    return value if type(value) is EncodedObject else EncodedObject(*encode_object(value, cache))
