"""Comparing replicas again without exchanging a digest for each: one number for each set of ranks.

A full plan finds out which rows (boxes and objects) are held by several ranks. Rows held by the same ranks
make a set. Each rank folds the digests of all its rows of a set, in an order that all ranks share, into 64
bits of BLAKE2b; equal folds on all ranks of a set mean equal digests, which a full plan compares one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import RankSets
from dcp.storage.formats.index import Int64, starts

if TYPE_CHECKING:
    from dcp.planners.columns import SaveColumns
    from dcp.planners.save.global_plan import Boxes, Items
    from dcp.planners.save.merge import MergedObjects

__all__ = ["Holders", "differing", "replica_sets"]


@dataclass(frozen=True, eq=False)
class Holders:
    """Which rows of which ranks were compared as replicas.

    Items of all ranks (``ranks``, ``rows``, whether their digest is ``known``) and the distinct boxes:
    ``members[start[b]:start[b + 1]]`` are the items of box b, ascending by rank. Objects: ``object_rows[r]``
    maps rank r's rows to rows of the index, ``objects_known[r]`` says which had a digest.
    """

    ranks: Int64
    rows: Int64
    known: npt.NDArray[np.bool_]
    members: Int64
    start: Int64
    object_rows: list[Int64]
    objects_known: list[npt.NDArray[np.bool_]]

    @classmethod
    def of(
        cls, items: Items, boxes: Boxes, objects: MergedObjects, all_columns: Sequence[SaveColumns]
    ) -> Holders:
        """The holders in a global plan."""
        known = [columns.objects.digests != 0 for columns in all_columns]
        return cls(
            items.ranks, items.rows, items.digests != 0, boxes.members, boxes.start, objects.rows, known
        )


def _no_int64() -> Int64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class _Members:
    """Rows that were compared: group (box or object), rank, row of the rank, key of all the group's ranks."""

    groups: Int64
    ranks: Int64
    rows: Int64
    keys: npt.NDArray[np.uint64]


def replica_sets(holders: Holders | None, world_size: int) -> list[RankSets] | None:
    """The sets by rank; None where a rank holds a box twice, which only a full plan compares."""
    if holders is None:
        return [RankSets(_no_int64(), starts([]), _no_int64(), starts([]), _no_int64())] * world_size
    items, objects = _members_of_boxes(holders), _members_of_objects(holders)
    if items is None:
        return None
    keys, numbers = np.unique(np.concatenate([items.keys, objects.keys]), return_inverse=True)
    of_items, of_objects = numbers[: len(items.keys)], numbers[len(items.keys) :]
    by_rank = []
    for rank in range(world_size):
        item_sets, item_rows = _of_rank(items, of_items, rank)
        object_sets, object_rows = _of_rank(objects, of_objects, rank)
        mine = np.union1d(item_sets, object_sets)
        by_rank.append(
            RankSets(
                numbers=mine,
                item_start=np.searchsorted(item_sets, np.append(mine, len(keys))).astype(np.int64),
                item_rows=item_rows,
                object_start=np.searchsorted(object_sets, np.append(mine, len(keys))).astype(np.int64),
                object_rows=object_rows,
            )
        )
    return by_rank


def _of_rank(members: _Members, sets: Int64, rank: int) -> tuple[Int64, Int64]:
    """(sets, rows) of a rank, by set and then in the order of the groups, which all ranks share."""
    mine = np.flatnonzero(members.ranks == rank)
    order = mine[np.argsort(sets[mine], kind="stable")]
    return sets[order], members.rows[order]


def _members_of_boxes(holders: Holders) -> _Members | None:
    boxes = np.repeat(np.arange(len(holders.start) - 1), np.diff(holders.start))
    known = holders.known[holders.members]
    items, boxes = holders.members[known], boxes[known]
    members = _members(boxes, holders.ranks[items], holders.rows[items])
    again = (members.groups[1:] == members.groups[:-1]) & (members.ranks[1:] == members.ranks[:-1])
    return None if again.any() else members


def _members_of_objects(holders: Holders) -> _Members:
    rows = [np.flatnonzero(known) for known in holders.objects_known]
    groups = np.concatenate([of[mine] for of, mine in zip(holders.object_rows, rows, strict=True)])
    ranks = np.repeat(np.arange(len(rows)), [len(mine) for mine in rows])
    order = np.argsort(groups, kind="stable")
    return _members(groups[order], ranks[order], np.concatenate(rows)[order])


def _members(groups: Int64, ranks: Int64, rows: Int64) -> _Members:
    """Those of several ranks; ``groups`` ascend."""
    first = np.flatnonzero(np.append(True, groups[1:] != groups[:-1])) if len(groups) else _no_int64()
    counts = np.diff(np.append(first, len(groups)))
    several = np.repeat(counts > 1, counts)
    # Sums of scattered numbers. Two sets with one key would do no harm: folds differ, plans are made anew.
    keys = np.add.reduceat(_scattered(ranks), first) if len(first) else np.zeros(0, np.uint64)
    return _Members(groups[several], ranks[several], rows[several], np.repeat(keys, counts)[several])


def _scattered(ranks: Int64) -> npt.NDArray[np.uint64]:
    """64 mixed bits by rank (the finaliser of SplitMix64)."""
    mixed = (ranks + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def differing(numbers: Sequence[Int64], folds: Sequence[npt.NDArray[np.uint64]]) -> bool:
    """Whether ranks of one set have different folds; ``folds[r]`` are those of ``numbers[r]``."""
    sets, values = np.concatenate(numbers), np.concatenate(folds)
    order = np.argsort(sets, kind="stable")
    sets, values = sets[order], values[order]
    return bool(((sets[1:] == sets[:-1]) & (values[1:] != values[:-1])).any())
