"""What one rank contributes to a save: columns, local tensors, values; nothing is nested."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp.planners.by_value import encode_by_value
from dcp.planners.columns import SaveColumns, SaveObjects
from dcp.planners.save.digest import ReplicaCheck, digest_bytes
from dcp.planners.save.planner import OPAQUE_OBJECT_BYTES, DefaultSavePlanner, item_digests
from dcp.planners.save.trust import foreign_values
from dcp.saving.objects import encode_object
from dcp.storage.errors import PlanError
from dcp.storage.file_partitions import EncodedObjects
from dcp.storage.formats.index import Int64
from dcp.storage.near_names import listed
from dcp.storage.tensors import LocalMemory

__all__ = ["EncodedObject", "RankState", "warn_of_foreign", "warn_of_keys"]

logger = logging.getLogger(__name__)

_MAX_TOLD = 10


class EncodedObject(NamedTuple):
    """A value as it will be stored: torch.save bytes, and plain msgpack bytes where it is plain data."""

    blob: bytes
    plain: bytes | None


@dataclass(frozen=True, eq=False)
class RankState:
    """One rank's part of a state dict.

    ``memory`` has the local tensors by the source numbers of ``columns``: the state's own, on any device, or
    staged copies. ``objects`` are the values by object row, encoded where they must not change any more.
    ``replicated`` (by item) says which boxes other ranks may hold too. ``digested``: the columns have the
    digests of the replica check.
    """

    columns: SaveColumns
    memory: LocalMemory
    objects: Sequence[Any]
    replicated: npt.NDArray[np.uint8]
    digested: bool = False

    @classmethod
    def collect(cls, planner: DefaultSavePlanner, *, digests: bool) -> RankState:
        """The state that ``planner`` was set up with; ``digests=False`` leaves them for later.

        The coordinator logs a warning of values that only a trusted checkpoint gives back.
        """
        columns, memory, objects = planner.create_local_columns(digests=digests)
        if planner.is_coordinator:
            warn_of_foreign(columns.objects.fqns, objects)
            warn_of_keys(planner.foreign_keys)
        return cls(columns, memory, objects, planner.item_replicated, digested=digests)

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        """The local tensors."""
        return self.memory.tensors

    def encoded(self) -> RankState:
        """The same with all values encoded: later changes of lists and dicts do not reach them."""
        cache: dict[bytes, bytes] = {}
        named = zip(self.columns.objects.fqns, self.objects, strict=True)
        return replace(self, objects=[encoded_object(fqn, value, cache) for fqn, value in named])

    def encoded_objects(self, rows: Int64) -> EncodedObjects:
        """The values of object rows ``rows``, encoded."""
        cache: dict[bytes, bytes] = {}
        fqns, values = self.columns.objects.fqns, self.objects
        # Two lists, because the interpreter's cyclic collection would look at each of very many pairs.
        blobs: list[bytes] = []
        plains: list[bytes | None] = []
        for row in rows.tolist():
            blob, plain = encoded_object(fqns[row], values[row], cache)
            blobs.append(blob)
            plains.append(plain)
        return EncodedObjects(blobs, plains)

    def with_digests(self, check: ReplicaCheck) -> RankState:
        """The same with the digests that the replica check compares."""
        if check == "off" or self.digested:
            return self
        columns = replace(
            self.columns,
            item_digests=item_digests(self.columns, self.replicated, self.sources, check),
            objects=self.digested_objects(check),
        )
        return replace(self, columns=columns, digested=True)

    def digested_objects(self, check: ReplicaCheck) -> SaveObjects:
        """The names of the values with their digests, 0 for what is no plain data, and about their sizes."""
        fqns = self.columns.objects.fqns
        digests, sizes = np.zeros(len(fqns), np.uint64), np.zeros(len(fqns), np.int64)
        for row, value in enumerate(self.objects if check != "off" else ()):
            encoded = value.plain if type(value) is EncodedObject else encode_by_value(value)
            if encoded is None:
                sizes[row] = _opaque_bytes(value)
            else:
                digests[row], sizes[row] = digest_bytes(encoded), len(encoded)
        return SaveObjects(fqns, digests, sizes)


def warn_of_foreign(fqns: Sequence[str], values: Sequence[Any]) -> None:
    """Log a warning of values that only a trusted checkpoint gives back."""
    found = foreign_values(fqns, values)
    if found:
        logger.warning(
            "%d of the saved values will load only with weights_only=False, or with their classes in "
            "torch.serialization.add_safe_globals: %s. Plain data instead needs neither",
            len(found),
            _told(found),
        )


def warn_of_keys(found: Mapping[str, str]) -> None:
    """Log a warning of keys that no checkpoint gives back; ``found`` are their types by name."""
    if found:
        logger.warning(
            "%d keys of dicts are saved as their strings alone: %s. They are found again in a state dict "
            "that has them, and are strings in any other. Numbers, strings, bytes, None and tuples are kept",
            len(found),
            _told(found),
        )


def _told(found: Mapping[str, str]) -> str:
    return listed(list(found), most=_MAX_TOLD, show=lambda fqn: f"{fqn!r:.200} ({found[fqn]})")


def _opaque_bytes(value: Any) -> int:
    if type(value) is EncodedObject:
        return max(len(value.blob), OPAQUE_OBJECT_BYTES)
    return len(value) if isinstance(value, bytes | bytearray | str) else OPAQUE_OBJECT_BYTES


def encoded_object(fqn: str, value: Any, cache: dict[bytes, bytes]) -> EncodedObject:
    """``value`` encoded, unless it is already; ``cache`` lives as long as one save.

    Raises PlanError, with the name, for what cannot be.
    """
    if type(value) is EncodedObject:
        return value
    try:
        return EncodedObject(*encode_object(value, cache))
    except Exception as error:  # whatever pickling code of the value's class raises
        raise PlanError(
            f"{fqn!r}, a {type(value).__name__}, cannot be stored: {type(error).__name__}: {error}. Keep it "
            "out of the state dict, or give what describes it as plain data",
            fqn=fqn,
        ) from error
