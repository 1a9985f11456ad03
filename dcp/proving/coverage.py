"""Whether the parts of a tensor that ranks have are each of its elements, once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.joins import BoxSet, disjoint, overlapping_pairs

__all__ = ["held_elements", "overlaps"]


def held_elements(boxes: Iterable[Box]) -> int:
    """Elements that are in any of ``boxes``, each counted once."""
    return sum(part.volume for _, part in disjoint([*boxes]))


def overlaps(boxes: Mapping[str, Collection[Box]]) -> dict[str, tuple[Box, Box]]:
    """By name of a tensor whose boxes are not apart two of them that share elements; ``boxes`` of one tensor
    are distinct."""
    names = [name for name, own in boxes.items() if len(own) > 1]
    by_ndim: dict[int, list[tuple[int, Box]]] = {}
    for number, name in enumerate(names):
        for box in boxes[name]:
            by_ndim.setdefault(len(box.sizes), []).append((number, box))
    found: dict[str, tuple[Box, Box]] = {}
    for numbered in by_ndim.values():
        numbers, own = zip(*numbered, strict=True)
        low = np.array([box.offsets for box in own], np.int64)
        high = np.array([box.high for box in own], np.int64)
        pairs = overlapping_pairs(BoxSet(np.array(numbers, np.int64), low, high))
        for one, other in zip(*(side.tolist() for side in pairs), strict=True):
            found.setdefault(names[numbers[one]], (own[one], own[other]))
    return found
