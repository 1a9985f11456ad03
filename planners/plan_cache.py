"""The plan of the save before, used again as long as no rank's part has changed.

The cache belongs to whoever saves again and again (one manager's session, one writer instance), with an
instance on each rank. A rank offers a digest of its part (`Offer`); where the coordinator finds all ranks'
unchanged since one common plan, it answers so, and neither plans nor writes travel. What changes from save to
save by purpose, the values, is no part of the digest; that replicas still hold equal values is checked by
folds (`dcp.planners.replica_sets`), and where they do not, a full plan finds out which and names them.

A plan is used only after its save was committed, and forgotten on any failure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from dcp.planners.codec import decode_rank_sets, encode_rank_sets
from dcp.planners.columns import SaveColumns, WriteColumns
from dcp.planners.digest import ReplicaCheck
from dcp.planners.folding import SetFolder
from dcp.planners.global_plan import GlobalSavePlan
from dcp.planners.known_state import KnownState
from dcp.planners.replica_sets import differing, replica_sets
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import Int64

__all__ = ["PlanCache", "RankPart", "structure_digest"]

_DIGEST_BYTES = 16
_FOLD_BYTES = 8

_STRUCTURE = (
    "dtype_codes",
    "requires_grad",
    "shape_start",
    "shape_values",
    "item_tensors",
    "item_offsets",
    "item_sizes",
    "item_local_offsets",
    "item_sources",
    "item_sharded",
    "item_ties",
)
"""The columns of `SaveColumns` that a plan follows from. Left out are the values' digests, and the objects'
sizes, which only say what is well balanced."""


class RankPart(Protocol):
    """What a rank contributes to a save (`dcp.local_state.LocalState` is one)."""

    @property
    def columns(self) -> SaveColumns:
        """The rank's columns."""

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        """The local tensors by source number."""

    @property
    def replicated(self) -> npt.NDArray[np.uint8]:
        """By item, 1 where other ranks may hold the same box."""


@dataclass(frozen=True, eq=False)
class _Structure:
    """A rank's part and its digest; equal arrays are mostly the very same ones."""

    columns: SaveColumns
    replicated: npt.NDArray[np.uint8]
    comparable: bytes
    options: bytes
    digest: bytes

    def is_of(self, part: RankPart, comparable: bytes, options: bytes) -> bool:
        mine, theirs = self.columns, part.columns
        return (
            self.comparable == comparable
            and self.options == options
            and self.replicated is part.replicated
            and mine.fqns is theirs.fqns
            and mine.objects.fqns is theirs.objects.fqns
            and mine.planner_data is theirs.planner_data
            and mine.stride_orders is theirs.stride_orders
            and all(getattr(mine, name) is getattr(theirs, name) for name in _STRUCTURE)
        )


@dataclass(frozen=True, eq=False)
class _RankPlan:
    """What a rank keeps: its part of the plan ``plan_id``, made of ``structure``."""

    plan_id: bytes
    structure: bytes
    writes: WriteColumns
    folder: SetFolder


@dataclass(frozen=True, eq=False)
class _JointPlan:
    """What the coordinator keeps: the plan, all ranks' digests, and the sets each rank folds."""

    plan_id: bytes
    structures: list[bytes]
    plan: GlobalSavePlan
    sets: list[Int64]


@dataclass(frozen=True, eq=False)
class _Offer:
    """What a rank says before a save: the digest of its part; if it has a plan for it, which, and folds."""

    structure: bytes
    plan_id: bytes = b""
    folds: bytes = b""

    def encode(self) -> bytes:
        return self.structure + self.plan_id + self.folds

    @classmethod
    def decode(cls, data: bytes) -> _Offer:
        ends = _DIGEST_BYTES, 2 * _DIGEST_BYTES
        if len(data) not in (ends[0], *range(ends[1], len(data) + 1, _FOLD_BYTES)):
            raise PlanError(f"a rank's offer of {len(data)} bytes cannot be understood")
        return cls(data[: ends[0]], data[ends[0] : ends[1]], data[ends[1] :])


class PlanCache:
    """The plan of one series of saves on one rank; see the module.

    ``known`` may be lent to a planner (`DefaultSavePlanner.known`) by the thread that collects the state; all
    else is used by the thread that saves. ``reused`` counts the saves that went by the cached plan.
    """

    def __init__(self) -> None:
        self.known = KnownState()
        self.reused = 0
        self._structure: _Structure | None = None
        self._offered: list[bytes] = []
        self._mine: _RankPlan | None = None
        self._joint: _JointPlan | None = None
        self._next_mine: _RankPlan | None = None
        self._next_joint: _JointPlan | None = None

    # -- on every rank ---------------------------------------------------------------------------------------

    def offer(
        self,
        part: RankPart,
        object_digests: npt.NDArray[np.uint64],
        *,
        check: ReplicaCheck,
        options: Sequence[Any],
    ) -> bytes:
        """This rank's message to the coordinator.

        ``object_digests`` are those of the values now, 0 for what cannot be compared. ``options`` is all else
        that decides on what this rank has to write, its number and that of all ranks with it; plain data.
        """
        structure = self._structure_of(part, object_digests, [check, *options])
        mine = self._mine
        if mine is None or mine.structure != structure:
            self._mine = None
            return _Offer(structure).encode()
        folds = mine.folder.folds(part.sources, object_digests)
        return _Offer(structure, mine.plan_id, folds.tobytes()).encode()

    def _structure_of(
        self, part: RankPart, object_digests: npt.NDArray[np.uint64], options: Sequence[Any]
    ) -> bytes:
        comparable, packed = (object_digests != 0).tobytes(), bytes(msgpack.packb(list(options)))
        known = self._structure
        if known is None or not known.is_of(part, comparable, packed):
            digest = structure_digest(part.columns, part.replicated, comparable, packed)
            known = _Structure(part.columns, part.replicated, comparable, packed, digest)
            self._structure = known
        return known.digest

    @property
    def writes(self) -> WriteColumns:
        """This rank's part of the cached plan; after a hit."""
        if self._mine is None:
            raise PlanError("the coordinator reuses a plan that this rank does not have")
        return self._mine.writes

    def receive(self, part: RankPart, writes: WriteColumns, extra: bytes, *, check: ReplicaCheck) -> None:
        """Take a new plan: ``extra`` is what `planned` made of it for this rank. Used after `commit`."""
        self._mine = self._next_mine = None
        structure = self._structure
        if not extra or structure is None:
            return
        columns = part.columns
        items, objects = len(columns.item_tensors), len(columns.objects.fqns)
        sets = decode_rank_sets(extra[_DIGEST_BYTES:], items=items, objects=objects)
        folder = SetFolder(sets, columns, check)
        self._next_mine = _RankPlan(extra[:_DIGEST_BYTES], structure.digest, writes, folder)

    def commit(self) -> None:
        """The save is committed: the plan that it went by may serve the next one."""
        if self._next_mine is None:
            self.reused += self._mine is not None
            return
        self._mine, self._joint = self._next_mine, self._next_joint
        self._next_mine = self._next_joint = None

    def drop(self) -> None:
        """Forget everything: a save failed."""
        self.known.clear()
        self._structure = None
        self._mine = self._joint = self._next_mine = self._next_joint = None

    # -- on the coordinator ----------------------------------------------------------------------------------

    def hit(self, offers: Sequence[bytes]) -> bool:
        """Whether all ranks' parts are those of the cached plan, which they all have, and replicas agree."""
        decoded = [_Offer.decode(offer) for offer in offers]
        self._offered = [offer.structure for offer in decoded]
        joint = self._joint
        if joint is None or joint.structures != self._offered:
            self._joint = None
            return False
        if any(offer.plan_id != joint.plan_id for offer in decoded):
            return False
        folds = [np.frombuffer(offer.folds, np.uint64) for offer in decoded]
        if any(len(mine) != len(sets) for mine, sets in zip(folds, joint.sets, strict=True)):
            raise PlanError("a rank folds other replicas than its plan says")
        return not differing(joint.sets, folds)

    @property
    def plan(self) -> GlobalSavePlan:
        """The cached plan; after a hit."""
        if self._joint is None:
            raise PlanError("there is no cached plan")
        return self._joint.plan

    def planned(self, plan: GlobalSavePlan, save_id: str) -> list[bytes]:
        """Keep a new plan, made of the parts last offered, for `commit`; returns what each rank receives."""
        self._joint = self._next_joint = None
        ranks = len(plan.writes)
        sets = replica_sets(plan.holders, ranks)
        if sets is None or len(self._offered) != ranks:
            return [b""] * ranks
        plan_id = _hashed([save_id.encode(), *self._offered])
        kept = replace(plan, holders=None)
        self._next_joint = _JointPlan(plan_id, self._offered, kept, [mine.numbers for mine in sets])
        return [plan_id + encode_rank_sets(mine) for mine in sets]


def structure_digest(
    columns: SaveColumns, replicated: npt.NDArray[np.uint8], comparable: bytes, options: bytes
) -> bytes:
    """128 bits over all that a plan follows from: names, shapes, dtypes, boxes, ties, paths, their order."""
    paths = columns.planner_data
    parts = [
        _packed(list(columns.fqns)),
        _packed(list(columns.objects.fqns)),
        _packed(None if paths is None else [list(paths.keys()), list(paths.values())]),
        _packed(sorted((row, list(order)) for row, order in columns.stride_orders.items())),
        *(np.ascontiguousarray(getattr(columns, name)).tobytes() for name in _STRUCTURE),
        np.ascontiguousarray(replicated).tobytes(),
        comparable,
        options,
    ]
    return _hashed(parts)


def _packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))


def _hashed(parts: Sequence[bytes]) -> bytes:
    """BLAKE2b of byte strings with their lengths, so that none can run into the next."""
    lengths = np.array([len(parts), *map(len, parts)], "<i8").tobytes()
    state = hashlib.blake2b(lengths, digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()
