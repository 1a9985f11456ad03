"""Whether the parts of a tensor that ranks have are each of its elements, once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.joins import BoxSet, disjoint, overlapping_pairs

__all__ = ["held_elements", "overlaps"]


def held_elements(boxes: Iterable[Box]) -> int:
    """Elements that are in any of ``boxes``, each counted once."""
    return sum(part.volume for _, part in disjoint([*boxes]))


@garbage_collection_paused()
def overlaps(boxes: Mapping[str, Collection[Box]]) -> dict[str, tuple[Box, Box]]:
    """By name of a tensor whose boxes are not apart two of them that share elements; ``boxes`` of one tensor
    are distinct."""
    names = [name for name, own in boxes.items() if len(own) > 1]
    by_ndim: dict[int, tuple[list[int], list[Box]]] = {}
    for number, name in enumerate(names):
        for box in boxes[name]:
            numbers, own = by_ndim.setdefault(len(box.sizes), ([], []))
            numbers.append(number)
            own.append(box)
    found: dict[str, tuple[Box, Box]] = {}
    for numbers, own in by_ndim.values():  # of a thousand ranks there are millions
        low, sizes = (np.array(column, np.int64) for column in zip(*own, strict=True))
        high = low + sizes
        pairs = overlapping_pairs(BoxSet(np.array(numbers, np.int64), low, high))
        for one, other in zip(*(side.tolist() for side in pairs), strict=True):
            found.setdefault(names[numbers[one]], (own[one], own[other]))
    return found
