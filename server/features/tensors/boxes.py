"""The chunks of a tensor as boxes over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

__all__ = ["BoxPicture", "DrawnBox", "box_picture"]

_MOST: Final = 1024
"""More boxes cannot be told apart, and a page should not hold them."""


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A chunk, in per cent of width and height. ``colour`` is the same for all of a rank."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    of: Any


@dataclass(frozen=True, slots=True)
class BoxPicture:
    """``dimensions``: those that go down (None: there is one only) and across."""

    boxes: tuple[DrawnBox, ...]
    dimensions: tuple[int | None, int]


def box_picture(tensor: Any) -> BoxPicture | None:
    """The chunks of a tensor, as the API has it, over the two dimensions that they cut.

    None where more are cut, where there are too many chunks, and for a tensor without elements.
    """
    shape = tensor.shape
    if not shape or 0 in shape or tensor.chunk_count > _MOST:
        return None
    cut = [at for at, size in enumerate(shape) if any(chunk.sizes[at] != size for chunk in tensor.chunks)]
    if len(cut) > 2:
        return None
    others = sorted((at for at in range(len(shape)) if at not in cut), key=lambda at: (-shape[at], at))
    chosen = sorted([*cut, *others][:2])
    down, across = (None, chosen[0]) if len(chosen) == 1 else (chosen[0], chosen[1])
    holders = {holder: place for place, holder in enumerate(dict.fromkeys(map(_holder, tensor.chunks)))}
    boxes = tuple(
        DrawnBox(
            *_span(chunk, shape, across)[:1],
            *_span(chunk, shape, down)[:1],
            *_span(chunk, shape, across)[1:],
            *_span(chunk, shape, down)[1:],
            holders[_holder(chunk)] % 6,
            chunk,
        )
        for chunk in tensor.chunks
    )
    return BoxPicture(boxes, (down, across))


def _holder(chunk: Any) -> Any:
    return chunk.file if chunk.rank is None else chunk.rank


def _span(chunk: Any, shape: Any, dimension: int | None) -> tuple[float, float]:
    """Where a chunk begins along ``dimension`` and how long it is, in per cent."""
    if dimension is None:
        return 0.0, 100.0
    size = shape[dimension]
    return round(100 * chunk.offsets[dimension] / size, 3), round(100 * chunk.sizes[dimension] / size, 3)
