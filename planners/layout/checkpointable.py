"""Local tensors that say which boxes of a global tensor they hold, in four attributes (torch 2.14 and newer).

The attributes are on a tensor, not on its class: any tensor may have them, in any version of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from dcp.planners.layout.placements import LocalBox
from dcp.storage.errors import PlanError

__all__ = [
    "CheckpointableTensor",
    "ShardClaim",
    "claim_of",
    "claimed_boxes",
    "has_claim",
    "with_claim",
]


@runtime_checkable
class CheckpointableTensor(Protocol):
    """A stand-in for ``torch.distributed.checkpoint.CheckpointableTensor``, for versions without it.

    A plain local tensor with these attributes holds boxes of a global one: box number i is at
    ``local_offsets[i]`` of this tensor and at ``global_offsets[i]`` of one of ``global_shape``, with
    ``local_sizes[i]`` elements a dimension. What lies outside of the boxes is neither saved nor loaded.
    """

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


class ShardClaim(NamedTuple):
    """The four attributes."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


_attributes = attrgetter(*ShardClaim._fields)


def has_claim(tensor: object) -> bool:
    """Return whether the tensor is a `CheckpointableTensor`."""
    return hasattr(tensor, "global_shape") and all(hasattr(tensor, name) for name in ShardClaim._fields)


def claim_of(tensor: torch.Tensor) -> ShardClaim | None:
    """Return the attributes of a `CheckpointableTensor` as they are; None for any other tensor."""
    return ShardClaim(*_attributes(tensor)) if has_claim(tensor) else None


def with_claim(tensor: torch.Tensor, claim: ShardClaim | None) -> torch.Tensor:
    """Give ``tensor`` these attributes, and return it."""
    for name, value in claim._asdict().items() if claim is not None else ():
        setattr(tensor, name, value)
    return tensor


def claimed_boxes(fqn: str, tensor: Any) -> tuple[tuple[int, ...], list[LocalBox]]:
    """Return the global shape of a `CheckpointableTensor`, and its boxes; PlanError for what torch
    refuses."""
    shape = tuple(tensor.global_shape)
    parts = [[tuple(row) for row in rows] for rows in _attributes(tensor)[1:]]
    if len({len(rows) for rows in parts}) > 1:
        raise _refused(fqn, "global_offsets, local_offsets and local_sizes must have the same length")
    boxes = []
    for number, (offsets, local_offsets, sizes) in enumerate(zip(*parts, strict=True)):
        _check_within(fqn, f"global_offsets[{number}]", offsets, sizes, shape)
        _check_within(fqn, f"local_offsets[{number}]", local_offsets, sizes, tuple(tensor.shape))
        boxes.append(LocalBox(offsets, sizes, local_offsets))
    return shape, boxes


def _check_within(
    fqn: str, what: str, offsets: Sequence[int], sizes: Sequence[int], shape: tuple[int, ...]
) -> None:
    if not len(offsets) == len(sizes) == len(shape):
        raise _refused(fqn, f"{what} and local_sizes must have {len(shape)} dimensions")
    for begin, size, extent in zip(offsets, sizes, shape, strict=True):
        if begin < 0 or size < 0 or begin + size > extent:
            raise _refused(fqn, f"{what} {tuple(offsets)} of sizes {tuple(sizes)} is outside of {shape}")


def _refused(fqn: str, why: str) -> PlanError:
    return PlanError(f"tensor {fqn!r} is a CheckpointableTensor whose {why}", fqn=fqn)
