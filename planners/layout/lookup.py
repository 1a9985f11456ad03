"""Finding the part of a state dict that an index of a plan names, as a view of local memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp.planners.layout.local_tensor import LocalPiece, LocalTensor, SpecCache, is_tensor_like, local_tensor
from dcp.storage.errors import PlanError

__all__ = ["BoxLookup", "box_view"]


def box_view(piece: LocalPiece, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the box at global ``offsets`` of extent ``sizes``, which must lie in ``piece``, as a view of its
    memory."""
    view = piece.source
    for dim, size in enumerate(sizes):
        begin = piece.box.local_offsets[dim] + offsets[dim] - piece.box.offsets[dim]
        if begin or size != view.shape[dim]:
            view = view.narrow(dim, begin, size)
    return view


def _contains(piece: LocalPiece, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return all(
        own <= begin and begin + size <= own + own_size
        for own, own_size, begin, size in zip(piece.box.offsets, piece.box.sizes, offsets, sizes, strict=True)
    )


@dataclass(eq=False)
class BoxLookup:
    """Looks boxes up in the state dict as it is now; a tensor that was replaced since is looked at again."""

    _layouts: SpecCache = field(default_factory=dict)
    _known: dict[str, tuple[Any, LocalTensor | None]] = field(default_factory=dict)

    def find(
        self, state_dict: Mapping[str, Any], index: MetadataIndex, sizes: tuple[int, ...] | None = None
    ) -> Any:
        """Return the value or tensor view that ``index`` names.

        ``sizes`` is the extent of the box; without it, the whole local box that begins at the index' offset.
        Raises PlanError where this rank has no such name or box.
        """
        fqn = index.fqn
        if fqn not in state_dict:
            raise PlanError(f"Could not find FQN: {fqn!r}, which the plan names, in the state dict", fqn=fqn)
        value = state_dict[fqn]
        if not is_tensor_like(value):
            if index.offset is not None:
                raise PlanError(
                    f"FQN: {fqn!r} is not a ShardedTensor, can't find by offset: '{index.offset}': it is a "
                    f"{type(value).__name__}",
                    fqn=fqn,
                )
            return value
        local = self._local(fqn, value)
        offsets = tuple(index.offset) if index.offset is not None else None
        if local is not None:
            for piece in local.pieces:
                if offsets is None and len(local.pieces) == 1:
                    return box_view(piece, piece.box.offsets, piece.box.sizes)
                if offsets is None or len(offsets) != len(piece.box.offsets):
                    continue
                if sizes is None and piece.box.offsets == offsets:
                    return box_view(piece, offsets, piece.box.sizes)
                if sizes is not None and _contains(piece, offsets, sizes):
                    return box_view(piece, offsets, sizes)
        raise PlanError(
            f"Could not find shard at '{index.offset}' for FQN: {fqn!r}: this rank has no such box of "
            f"sizes {sizes}",
            fqn=fqn,
        )

    def _local(self, fqn: str, value: Any) -> LocalTensor | None:
        known = self._known.get(fqn)
        if known is None or known[0] is not value:
            known = self._known[fqn] = (value, local_tensor(fqn, value, self._layouts))
        return known[1]
