"""Destinations that share memory, such as tied weights: entries that differ cannot both be loaded there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from dcp.loading.feature import LoadFeature
from dcp.planners.columns import HeldBoxes
from dcp.storage.engine.memory import Place, repeats_places, share_memory
from dcp.storage.engine.reading.requests import Pieces
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex, Int64, itemsizes
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.joins import BoxSet, overlapping_pairs
from dcp.storage.geometry.strides import extent
from dcp.storage.near_names import listed
from dcp.storage.tensors import LocalMemory, as_copied, narrow
from dcp.storage.torch_storage.destinations import refuse_shared

__all__ = ["SharedMemory"]

_MAX_LISTED = 10
_MOST_BOXES = 4096
_MOST_PAIRS = 1000
"""Of more all destinations are taken to share memory, which costs a copy of each."""


@dataclass(frozen=True)
class _SharedTarget:
    """A box of a destination that has memory in common with those of ``fqns``, and what was loaded for it.

    ``is_filled``: another entry is loaded into the very same elements.
    """

    fqns: Sequence[str]
    target: torch.Tensor
    loaded: torch.Tensor
    is_filled: bool


class SharedMemory(LoadFeature):
    """Loads apart what shares memory, and puts it there once it is known to be the same."""

    name = "shared_memory"
    _shared: Sequence[_SharedTarget] = ()

    def boxes(
        self, pieces: Pieces, index: CheckpointIndex, held: HeldBoxes, memory: LocalMemory
    ) -> LocalMemory:
        """Return the memory to load into, in which such destinations have others in their places.

        These are few: tied weights whose entries are one payload need none. Raises PlanError for a
        destination whose own elements share memory.
        """
        self._shared = ()
        groups = _groups(pieces, memory, held)
        if not groups:
            return memory
        tensors, shared = list(memory.tensors), list[_SharedTarget]()
        rows = _Rows(pieces, index)
        for group in groups:
            is_same = len({_view_of(tensors[dest]) for dest in group}) == 1
            if is_same and len({rows.source(dest) for dest in group}) == 1:
                continue
            group = sorted(group) if is_same else _sharing(tensors, group)
            is_same = is_same and all(rows.volume(dest) == tensors[dest].numel() for dest in group)
            fqns = [_fqn(held, dest) for dest in group]
            for dest in group[1:] if is_same else group:
                target = tensors[dest]
                loaded = tensors[dest] = torch.empty(target.shape, dtype=target.dtype, device="cpu")
                for box in rows.boxes(dest):
                    own, other = (narrow(tensor.detach(), *box) for tensor in (target, loaded))
                    shared.append(_SharedTarget(fqns, own, other, is_same))
        self._shared = shared
        return LocalMemory.of(tensors) if shared else memory

    @torch.inference_mode()
    def put(self) -> None:
        """Put what was loaded apart. Raises PlanError where one entry differs from another in the same
        memory."""
        shared, self._shared = self._shared, ()
        if not shared:
            return
        for each in shared:
            if not each.is_filled:
                as_copied(each.target).copy_(as_copied(each.loaded))
        differing = {tuple(each.fqns) for each in shared if not _is_equal(each.target, each.loaded)}
        if differing:
            shown = "; ".join(listed(fqns, most=_MAX_LISTED) for fqns in sorted(differing)[:_MAX_LISTED])
            raise PlanError(
                f"entries share memory in the state dict, but have different values in the checkpoint: "
                f"{shown}. Load into tensors with memory of their own (clone()), or leave one of them out "
                "(exclude=...)",
                fqns=[fqn for fqns in sorted(differing) for fqn in fqns][:_MAX_LISTED],
            )


def _is_equal(target: torch.Tensor, loaded: torch.Tensor) -> bool:
    return torch.equal(*(_bytes(tensor) for tensor in (target, loaded)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Compared instead of numbers, because a NaN equals nothing."""
    dense = as_copied(tensor).resolve_conj().resolve_neg().cpu().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # of one element any stride is dense


class _Rows:
    """The rows of a load plan by destination."""

    def __init__(self, pieces: Pieces, index: CheckpointIndex) -> None:
        self._pieces = pieces
        self._index = index
        self._order = np.argsort(pieces.dests, kind="stable")
        self._sorted = pieces.dests[self._order]
        self._boxes = (pieces.storage_offsets, pieces.dest_offsets, pieces.lengths)

    def source(self, dest: int) -> Any:
        """Equal for destinations that get the same stored elements at the same places."""
        pieces, index, rows = self._pieces, self._index, self._of(dest)
        chunks = pieces.chunks[rows]
        places = (index.chunk_files, index.record_offsets, index.payload_offsets)
        return (
            *(place[chunks].tobytes() for place in places),
            *(index.payload_strides.get(chunk) for chunk in chunks.tolist()),
            *(each[part].tobytes() for part in self._parts(rows) for each in self._boxes),
        )

    def boxes(self, dest: int) -> Iterator[Box]:
        """Yield what of the destination is filled."""
        _, *filled = self._boxes
        for part in self._parts(self._of(dest)):
            yield Box(*(tuple(each[part].tolist()) for each in filled))

    def volume(self, dest: int) -> int:
        """Return how many elements of the destination are filled."""
        return sum(box.volume for box in self.boxes(dest))

    def _of(self, dest: int) -> Int64:
        return self._order[slice(*np.searchsorted(self._sorted, [dest, dest + 1]))]

    def _parts(self, rows: Int64) -> Iterator[slice]:
        start = self._pieces.box_start
        return map(slice, start[rows].tolist(), start[rows + 1].tolist())


def _groups(pieces: Pieces, memory: LocalMemory, wanted: HeldBoxes) -> list[list[int]]:
    """Return numbers of destinations whose extents in memory meet."""
    dests = np.flatnonzero(np.bincount(pieces.dests, minlength=len(memory.tensors)))
    sizes = (memory.volumes * itemsizes(memory.dtype_codes))[dests]
    for position in np.flatnonzero(~memory.is_plain[dests]).tolist():
        tensor = memory.tensors[dests[position]]
        if not tensor.is_contiguous():
            if repeats_places(tensor.shape, tensor.stride()):
                refuse_shared(_fqn(wanted, int(dests[position])), tensor)
            sizes[position] = extent(tensor.shape, tensor.stride()) * tensor.element_size()
    dests, sizes = dests[sizes > 0], sizes[sizes > 0]
    begins = memory.pointers[dests]
    order = np.argsort(begins, kind="stable")
    dests, begins = dests[order], begins[order]
    is_apart = begins[1:] >= np.maximum.accumulate(begins + sizes[order])[:-1]
    if is_apart.all():
        return []
    groups = np.split(dests, np.flatnonzero(is_apart) + 1)
    return [group.tolist() for group in groups if len(group) > 1]


def _sharing(tensors: Sequence[torch.Tensor], group: Sequence[int]) -> list[int]:
    """Return those of ``group`` that share memory with another one of it: what interleaves need not."""
    numbers = np.sort(group)
    if len(numbers) > _MOST_BOXES:
        return list(numbers.tolist())
    places = [_place(tensors[number]) for number in numbers.tolist()]
    boxes = _boxes_of_one(tensors[numbers[0]].untyped_storage().data_ptr(), places)
    if boxes is not None:
        found = np.unique(overlapping_pairs(boxes))
    elif len(places) * len(places) > 2 * _MOST_PAIRS:
        found = np.arange(len(places))
    else:
        pairs = combinations(range(len(places)), 2)
        found = np.unique([pair for pair in pairs if share_memory(*(places[at] for at in pair))])
    return list(numbers[found.astype(np.int64)].tolist())


def _boxes_of_one(address: int, places: Sequence[Place]) -> BoxSet | None:
    """Return the boxes, in bytes, that slices of one larger tensor at ``address`` are of it; None for
    others."""
    if len({place.strides for place in places}) > 1:
        return None
    steps = np.array([*places[0].strides, 1], np.int64)
    order = np.argsort(-steps, kind="stable")
    steps = steps[order]
    if not steps.all() or (steps[:-1] % steps[1:]).any():
        return None
    sizes = np.array([(*place.sizes, place.itemsize) for place in places], np.int64)[:, order]
    at = np.array([place.address for place in places], np.int64)[:, None] - address
    low = at // steps
    low[:, 1:] %= steps[:-1] // steps[1:]
    if ((low + sizes)[:, 1:] > steps[:-1] // steps[1:]).any():
        return None
    return BoxSet(np.zeros(len(places), np.int64), low, low + sizes)


def _place(tensor: torch.Tensor) -> Place:
    size = tensor.element_size()
    return Place(tensor.data_ptr(), size, tuple(tensor.shape), tuple(step * size for step in tensor.stride()))


def _view_of(tensor: torch.Tensor) -> Any:
    return _place(tensor), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def _fqn(wanted: HeldBoxes, dest: int) -> str:
    return wanted.fqns[int(wanted.item_tensors[np.flatnonzero(wanted.item_sources == dest)[0]])]
