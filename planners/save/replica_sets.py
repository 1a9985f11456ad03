"""Comparing replicas again without exchanging a digest for each: one number for each set of ranks.

A full plan finds out which rows (boxes and objects) are held by several ranks. Rows held by the same ranks
make a set. Each rank folds the digests of all its rows of a set, in an order that all ranks share, into 64
bits of BLAKE2b; equal folds on all ranks of a set mean equal digests, which a full plan compares one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import RankSets, SaveColumns
from dcp.planners.digest import ReplicaCheck, digest_tensors
from dcp.planners.rank_state import RankState
from dcp.planners.save.tables import Boxes, GlobalObjects, Items
from dcp.storage.geometry.strides import Int64

__all__ = ["differing", "folds_of", "replica_sets"]

_FOLD_BYTES = 8


def _no_int64() -> Int64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class _Members:
    """Rows that were compared: group (box or object), rank, row of the rank, key of all the group's ranks."""

    groups: Int64
    ranks: Int64
    rows: Int64
    keys: npt.NDArray[np.uint64]


def replica_sets(
    items: Items, boxes: Boxes, objects: GlobalObjects, all_columns: Sequence[SaveColumns]
) -> list[RankSets] | None:
    """Find the sets, by rank, of what has digests; None where a rank holds a box twice, which only a full
    plan compares."""
    of_boxes, of_objects = _members_of_boxes(items, boxes), _members_of_objects(objects, all_columns)
    if of_boxes is None:
        return None
    keys, numbers = np.unique(np.concatenate([of_boxes.keys, of_objects.keys]), return_inverse=True)
    box_numbers, object_numbers = numbers[: len(of_boxes.keys)], numbers[len(of_boxes.keys) :]
    by_rank = []
    for rank in range(len(all_columns)):
        item_sets, item_rows = _of_rank(of_boxes, box_numbers, rank)
        object_sets, object_rows = _of_rank(of_objects, object_numbers, rank)
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
    """Return (sets, rows) of a rank, by set and then in the order of the groups, which all ranks share."""
    mine = np.flatnonzero(members.ranks == rank)
    order = mine[np.argsort(sets[mine], kind="stable")]
    return sets[order], members.rows[order]


def _members_of_boxes(items: Items, boxes: Boxes) -> _Members | None:
    known = items.digests[boxes.members] != 0
    members, groups = boxes.members[known], np.repeat(np.arange(len(boxes.start) - 1), np.diff(boxes.start))
    found = _members(groups[known], items.ranks[members], items.rows[members])
    again = (found.groups[1:] == found.groups[:-1]) & (found.ranks[1:] == found.ranks[:-1])
    return None if again.any() else found


def _members_of_objects(objects: GlobalObjects, all_columns: Sequence[SaveColumns]) -> _Members:
    rows = [np.flatnonzero(columns.objects.digests) for columns in all_columns]
    groups = np.concatenate([of[mine] for of, mine in zip(objects.rows, rows, strict=True)])
    ranks = np.repeat(np.arange(len(rows)), [len(mine) for mine in rows])
    order = np.argsort(groups, kind="stable")
    return _members(groups[order], ranks[order], np.concatenate(rows)[order])


def _members(groups: Int64, ranks: Int64, rows: Int64) -> _Members:
    """Return those of several ranks; ``groups`` ascend."""
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


def folds_of(
    sets: RankSets, part: RankState, object_digests: npt.NDArray[np.uint64], check: ReplicaCheck
) -> npt.NDArray[np.uint64]:
    """Compute the fold of each set, in the order of their numbers, for the values that ``part`` has now."""
    items = digest_tensors(part.views(sets.item_rows), check)
    objects = object_digests[sets.object_rows]
    bounds = zip(pairwise(sets.item_start.tolist()), pairwise(sets.object_start.tolist()), strict=True)
    folds = [
        blake2b(items[first:last].tobytes() + objects[begin:end].tobytes(), digest_size=_FOLD_BYTES).digest()
        for (first, last), (begin, end) in bounds
    ]
    return np.frombuffer(b"".join(folds), np.uint64)


def differing(numbers: Sequence[Int64], folds: Sequence[npt.NDArray[np.uint64]]) -> bool:
    """Return whether ranks of one set have different folds; ``folds[r]`` are those of ``numbers[r]``."""
    sets, values = np.concatenate(numbers), np.concatenate(folds)
    order = np.argsort(sets, kind="stable")
    sets, values = sets[order], values[order]
    return bool(((sets[1:] == sets[:-1]) & (values[1:] != values[:-1])).any())
